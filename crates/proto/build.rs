//! Compiles `proto/` with protox, so that no `protoc` is needed.

use std::path::{Path, PathBuf};
use std::{env, error::Error, fs};

use prost::Message as _;

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("../../proto");
    let files: Vec<PathBuf> = ["common", "filesystem", "process", "stamp", "tool", "workspace"]
        .iter()
        .map(|name| root.join(format!("cofferdam/v1/{name}.proto")))
        .collect();
    println!("cargo:rerun-if-changed={}", root.display());

    let descriptors = protox::compile(&files, [&root])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptor.bin"), descriptors.encode_to_vec())?;
    // The transport helper would be called `connect`, as the RPC is.
    tonic_prost_build::configure().build_transport(false).bytes(".").compile_fds(descriptors)?;
    Ok(())
}
