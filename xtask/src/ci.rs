//! `cargo xtask ci`: everything that must hold of the source.

use std::path::Path;

use anyhow::{Context as _, ensure};

use crate::metadata::Metadata;
use crate::stage::{Stages, cargo, succeed};
use crate::{docs, edges, supply};

/// The one crate of the product that may hold unsafe code, and the programs that try in tests what
/// safe code cannot even say.
const UNSAFE_CRATES: [&str; 2] = ["crates/sys", "tests/probes"];

/// A crate's own introduction may lead its reader to a private module.
const RUSTDOC_FLAGS: &str = "-D warnings -A rustdoc::private_intra_doc_links";

/// Checks the source.
pub(crate) fn ci() -> anyhow::Result<()> {
    let mut stages = Stages::default();
    let metadata = stages.run("metadata", Metadata::read)?;
    // Each check says what it has to say, also when another has failed.
    let lints = ["clippy", "--release", "--workspace", "--all-targets", "--locked", "--"];
    let doc = ["doc", "--release", "--workspace", "--no-deps"];
    let checks: [(&str, &dyn Fn() -> anyhow::Result<()>); 7] = [
        ("format", &|| succeed(&mut cargo(&["fmt", "--all", "--check"]))),
        ("edges between crates", &|| edges::check(&metadata)),
        ("licences, sources, bans", &|| supply::check(&metadata)),
        ("unsafe code in sys only", &unsafe_is_forbidden),
        ("clippy", &|| succeed(cargo(&lints).args(["-D", "warnings"]))),
        ("documentation", &|| {
            succeed(cargo(&doc).arg("--locked").env("RUSTDOCFLAGS", RUSTDOC_FLAGS))
        }),
        ("pages made from the program", &docs::check),
    ];
    let mut failed = Vec::new();
    for (name, check) in checks {
        if let Err(error) = stages.run(name, check) {
            eprintln!("{error:#}");
            failed.push(name);
        }
    }
    stages.print();
    ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
    Ok(())
}

/// Every other crate forbids unsafe code, so that no `allow` further in can bring it back.
fn unsafe_is_forbidden() -> anyhow::Result<()> {
    let mut open = Vec::new();
    for parent in ["crates", "tests", "."] {
        for entry in std::fs::read_dir(parent).with_context(|| format!("list {parent}"))? {
            let crate_dir = entry?.path();
            let is_crate = crate_dir.join("Cargo.toml").is_file();
            if !is_crate || UNSAFE_CRATES.iter().any(|name| crate_dir.ends_with(name)) {
                continue;
            }
            open.extend(roots(&crate_dir).into_iter().filter(|root| !forbids(root)));
        }
    }
    ensure!(open.is_empty(), "without #![forbid(unsafe_code)]:\n  {}", open.join("\n  "));
    Ok(())
}

/// The files where a crate's targets start.
fn roots(crate_dir: &Path) -> Vec<String> {
    let source = ["src/lib.rs", "src/main.rs"].map(|name| crate_dir.join(name));
    let beside = ["src/bin", "tests", "examples", "benches"].map(|name| crate_dir.join(name));
    let more = beside.iter().filter_map(|dir| std::fs::read_dir(dir).ok()).flatten().flatten();
    let more =
        more.map(|entry| entry.path()).filter(|path| path.extension() == Some("rs".as_ref()));
    let all = source.into_iter().filter(|path| path.is_file()).chain(more);
    all.map(|path| path.display().to_string()).collect()
}

fn forbids(root: &str) -> bool {
    std::fs::read_to_string(root).is_ok_and(|text| text.contains("#![forbid(unsafe_code)]"))
}
