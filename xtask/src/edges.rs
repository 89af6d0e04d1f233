//! The arrows between crates point down only, and what must not know of something does not.
//!
//! ARCHITECTURE.md says why. A new crate is an error until it has a line here.

use anyhow::ensure;

use crate::metadata::Metadata;

/// Each crate, and which others of ours it may use.
const EDGES: [(&str, &[&str]); 16] = [
    ("cofferdam-spec", &[]),
    ("cofferdam-sys", &[]),
    ("cofferdam-proto", &["cofferdam-spec"]),
    ("cofferdam-transport", &[]),
    ("cofferdam-sandbox", &["cofferdam-spec", "cofferdam-sys"]),
    ("cofferdam-files", &["cofferdam-spec", "cofferdam-sys"]),
    (
        "cofferdam-cell",
        &["cofferdam-spec", "cofferdam-sys", "cofferdam-sandbox", "cofferdam-files"],
    ),
    (
        "cofferdam-daemon",
        &[
            "cofferdam-proto",
            "cofferdam-spec",
            "cofferdam-sandbox",
            "cofferdam-cell",
            "cofferdam-files",
            "cofferdam-transport",
        ],
    ),
    ("cofferdam-client", &["cofferdam-spec"]),
    (
        "cofferdam-client-grpc",
        &["cofferdam-client", "cofferdam-proto", "cofferdam-spec", "cofferdam-transport"],
    ),
    (
        "cofferdam-cli",
        &[
            "cofferdam-cell",
            "cofferdam-client",
            "cofferdam-client-grpc",
            "cofferdam-daemon",
            "cofferdam-sandbox",
            "cofferdam-spec",
        ],
    ),
    // The benchmark gives bubblewrap the same image and the same filter.
    (
        "xtask",
        &["cofferdam-client", "cofferdam-client-grpc", "cofferdam-sandbox", "cofferdam-spec"],
    ),
    // What drives the real binaries speaks the wire itself, so that a bug of our client cannot
    // hide one of the daemon.
    ("cofferdam-probes", &[]),
    ("cofferdam-e2e", &["cofferdam-probes", "cofferdam-proto"]),
    ("cofferdam-cases", &["cofferdam-e2e", "cofferdam-proto"]),
    // A cell without a daemon: the isolating library runs alone.
    ("cofferdam-standalone", &["cofferdam-cell", "cofferdam-sandbox", "cofferdam-spec"]),
];

/// A crate, and packages that must not be anywhere below it.
const KNOWS_NOTHING_OF: [(&str, &[&str]); 5] = [
    ("cofferdam-spec", &["tonic", "tokio", "prost", "rustix", "nix"]),
    ("cofferdam-sys", &["tonic", "tokio", "prost"]),
    ("cofferdam-sandbox", &["tonic", "tokio", "prost"]),
    ("cofferdam-cell", &["tonic", "tokio", "prost"]),
    ("cofferdam-client", &["tonic", "tokio", "prost", "hyper"]),
];

/// Checks every edge; all breaches are reported.
pub(crate) fn check(metadata: &Metadata) -> anyhow::Result<()> {
    let mut breaches = Vec::new();
    let found = metadata.own_edges();
    for (name, uses) in &found {
        let Some((_, allowed)) = EDGES.iter().find(|(known, _)| known == name) else {
            breaches.push(format!("{name} has no line in xtask/src/edges.rs"));
            continue;
        };
        let wrong = uses.iter().filter(|used| !allowed.contains(used));
        breaches.extend(wrong.map(|used| format!("{name} uses {used}")));
    }
    let gone = EDGES.iter().filter(|(name, _)| !found.contains_key(name));
    breaches.extend(gone.map(|(name, _)| format!("{name} is not in the workspace")));
    for (name, unknown) in KNOWS_NOTHING_OF {
        let inside = metadata.everything_in(name);
        let wrong = unknown.iter().filter(|package| inside.contains(*package));
        breaches.extend(wrong.map(|package| format!("{name} has {package} below it")));
    }
    ensure!(breaches.is_empty(), "edges between crates:\n  {}", breaches.join("\n  "));
    Ok(())
}
