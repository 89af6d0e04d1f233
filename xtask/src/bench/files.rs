//! What the file tools cost: beside the same work done bare, and beside `rg`.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, ensure};
use cofferdam_client::{CallToolRequest, Chunks as _, Client as _, ExecuteRequest};
use cofferdam_client_grpc::GrpcClient;
use serde::{Deserialize, Serialize};

use super::measure::{milliseconds, unique};
use super::stats::Summary;

/// Bytes of the small file that is read and written.
const SMALL_BYTES: usize = 1024;

/// Bytes of the large file that is streamed.
const LARGE_BYTES: usize = 64 * 1024 * 1024;

/// Times that the large file is read.
const LARGE_ROUNDS: usize = 12;

/// Files of the tree that is searched, in directories of a hundred.
const TREE_FILES: usize = 10_000;

/// Times that the tree is searched.
const SEARCH_ROUNDS: usize = 20;

/// Files of the tree with a line that is searched for: below the limit of a hundred hits.
const TREE_HITS: usize = 80;

/// The line that is searched for.
const NEEDLE: &str = "fn needle_in_the_tree";

/// What was measured of files.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Files {
    /// The tool `read_file` with a file of 1 KiB.
    pub(crate) read_small_ms: Summary,
    /// The tool `write_file` with 1 KiB over 1 KiB.
    pub(crate) write_small_ms: Summary,
    /// The same bare: a temporary file, fsync, rename.
    pub(crate) bare_write_ms: Summary,
    /// Gibibytes a second of Read, 64 MiB.
    pub(crate) read_large_gib: Summary,
    pub(crate) grep_ms: Summary,
    /// `rg` in the same cell, through Execute.
    pub(crate) rg_in_cell_ms: Summary,
    pub(crate) rg_bare_ms: Summary,
    pub(crate) glob_ms: Summary,
    /// `rg --files`, outside.
    pub(crate) rg_files_bare_ms: Summary,
    /// The same in the cell, through Execute.
    pub(crate) rg_files_in_cell_ms: Summary,
}

/// Measures.
pub(crate) async fn measure(
    client: &GrpcClient,
    workspace: &Path,
    rounds: usize,
) -> anyhow::Result<Files> {
    let bench = Bench { client, workspace };
    let [read_small_ms, write_small_ms, bare_write_ms] = bench.small(rounds).await?;
    let read_large_gib = bench.large().await?;
    let tree = make_tree(workspace)?;
    let [grep_ms, rg_in_cell_ms, rg_bare_ms] = bench.grep(&tree).await?;
    let [glob_ms, rg_files_in_cell_ms, rg_files_bare_ms] = bench.glob(&tree).await?;
    Ok(Files {
        read_small_ms,
        write_small_ms,
        bare_write_ms,
        read_large_gib,
        grep_ms,
        rg_in_cell_ms,
        rg_bare_ms,
        glob_ms,
        rg_files_bare_ms,
        rg_files_in_cell_ms,
    })
}

struct Bench<'a> {
    client: &'a GrpcClient,
    workspace: &'a Path,
}

impl Bench<'_> {
    async fn call(&self, name: &str, input: serde_json::Value) -> anyhow::Result<String> {
        let request = CallToolRequest {
            name: name.to_owned(),
            input_json: input.to_string(),
            session: "bench".to_owned(),
            request_id: unique(),
        };
        let reply = self.client.call_tool(request).await?;
        ensure!(!reply.is_error, "{name}: {}", reply.output_json);
        Ok(reply.output_json)
    }

    /// Reading 1 KiB; then writing it, and the same write done bare, in turns. Reads come first and
    /// alone: what the disk does after a write is no part of them.
    async fn small(&self, rounds: usize) -> anyhow::Result<[Summary; 3]> {
        let text = "0123456789abcde\n".repeat(SMALL_BYTES / 16);
        let path = "/workspace/small.txt";
        self.call("write_file", serde_json::json!({"filePath": path, "content": text})).await?;
        let mut times: [Vec<f64>; 3] = Default::default();
        for _ in 0..rounds {
            let before = Instant::now();
            self.call("read_file", serde_json::json!({"filePath": path})).await?;
            times[0].push(milliseconds(before));
        }
        for _ in 0..rounds {
            let input = serde_json::json!({"filePath": path, "content": text});
            let before = Instant::now();
            self.call("write_file", input).await?;
            times[1].push(milliseconds(before));
            let before = Instant::now();
            bare_write(self.workspace, text.as_bytes())?;
            times[2].push(milliseconds(before));
        }
        Ok(times.map(|mut times| Summary::of(&mut times)))
    }

    async fn large(&self) -> anyhow::Result<Summary> {
        let bytes: Vec<u8> = (0..=255_u8).cycle().take(LARGE_BYTES).collect();
        fs::write(self.workspace.join("large.bin"), bytes)?;
        let mut rates = Vec::new();
        for _ in 0..LARGE_ROUNDS {
            let before = Instant::now();
            let mut chunks = self.client.read("/workspace/large.bin", 0, 0, "bench").await?;
            let mut read = 0;
            while let Some(chunk) = chunks.next().await? {
                read += chunk.len();
            }
            let seconds = before.elapsed().as_secs_f64();
            ensure!(read == LARGE_BYTES, "{read} bytes came");
            rates.push(LARGE_BYTES as f64 / seconds / f64::from(1 << 30));
        }
        Ok(Summary::of(&mut rates))
    }

    /// The tool, `rg` in the cell, `rg` outside.
    async fn grep(&self, tree: &Path) -> anyhow::Result<[Summary; 3]> {
        let input = serde_json::json!({"pattern": NEEDLE, "path": "/workspace/tree"});
        let arguments = ["-n", "--hidden", "-g", "!.git", NEEDLE];
        let hits = |text: &str| text.matches(NEEDLE).count();
        let mut times: [Vec<f64>; 3] = Default::default();
        for round in 0..=SEARCH_ROUNDS {
            let before = Instant::now();
            let found = self.call("grep", input.clone()).await?;
            let tool = milliseconds(before);
            ensure!(hits(&found) == TREE_HITS, "the tool found {}", hits(&found));
            let (found, inside) = self.rg_in_cell(&arguments).await?;
            ensure!(hits(&found) == TREE_HITS, "rg in the cell found {}", hits(&found));
            let (found, bare) = rg_bare(&arguments, tree)?;
            ensure!(hits(&found) == TREE_HITS, "rg found {}", hits(&found));
            // The first round warms the caches.
            if round > 0 {
                [tool, inside, bare].iter().zip(&mut times).for_each(|(time, all)| all.push(*time));
            }
        }
        Ok(times.map(|mut times| Summary::of(&mut times)))
    }

    /// The tool, `rg --files` in the cell, `rg --files` outside.
    async fn glob(&self, tree: &Path) -> anyhow::Result<[Summary; 3]> {
        let input =
            serde_json::json!({"pattern": "**/*.rs", "path": "/workspace/tree", "limit": 1000});
        let arguments = ["--files", "--hidden", "-g", "!.git", "-g", "*.rs"];
        let mut times: [Vec<f64>; 3] = Default::default();
        for round in 0..=SEARCH_ROUNDS {
            let before = Instant::now();
            let found = self.call("glob", input.clone()).await?;
            let tool = milliseconds(before);
            ensure!(found.contains("\"count\":1000"), "a thousand files are found");
            let (_, inside) = self.rg_in_cell(&arguments).await?;
            let (found, bare) = rg_bare(&arguments, tree)?;
            ensure!(found.lines().count() == TREE_FILES, "rg lists every file");
            if round > 0 {
                [tool, inside, bare].iter().zip(&mut times).for_each(|(time, all)| all.push(*time));
            }
        }
        Ok(times.map(|mut times| Summary::of(&mut times)))
    }

    async fn rg_in_cell(&self, arguments: &[&str]) -> anyhow::Result<(String, f64)> {
        let mut request = ExecuteRequest {
            session: "bench".to_owned(),
            request_id: unique(),
            ..ExecuteRequest::default()
        };
        request.program.command =
            std::iter::once("rg").chain(arguments.iter().copied()).map(str::to_owned).collect();
        request.program.command.push("/workspace/tree".to_owned());
        let before = Instant::now();
        let reply = self.client.execute(request).await?;
        let time = milliseconds(before);
        ensure!(reply.report.exit.shell_status() == 0, "rg in the cell: {:?}", reply.report.exit);
        Ok((String::from_utf8_lossy(&reply.stdout).into_owned(), time))
    }
}

/// `rg` outside, with its output read.
fn rg_bare(arguments: &[&str], tree: &Path) -> anyhow::Result<(String, f64)> {
    let mut command = Command::new("rg");
    command.args(arguments).arg(tree).stdin(Stdio::null());
    let before = Instant::now();
    let output = command.output().context("start rg")?;
    let time = milliseconds(before);
    ensure!(output.status.success(), "rg: {}", output.status);
    Ok((String::from_utf8_lossy(&output.stdout).into_owned(), time))
}

/// What replaces a file safely: a temporary file, fsync, rename.
fn bare_write(directory: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let temporary = directory.join("bare.tmp");
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(temporary, directory.join("bare.txt"))?;
    Ok(())
}

/// A tree of source files, some with the line that is searched for.
fn make_tree(workspace: &Path) -> anyhow::Result<PathBuf> {
    let tree = workspace.join("tree");
    let filler = "    let value = compute(first, second)?;\n    list.push(value);\n".repeat(16);
    for number in 0..TREE_FILES {
        let directory = tree.join(format!("d{:03}", number / 100));
        if number % 100 == 0 {
            fs::create_dir_all(&directory)?;
        }
        let hit = number % (TREE_FILES / TREE_HITS) == 0;
        let line = if hit { format!("{NEEDLE}() {{\n") } else { format!("fn f{number}() {{\n") };
        fs::write(directory.join(format!("f{number:05}.rs")), line + &filler)?;
    }
    Ok(tree)
}
