//! A cell without the daemon: runs shell commands in a directory, one after another.
//!
//! ```sh
//! cargo run --release -p cofferdam-cell --example standalone -- DIRECTORY 'COMMAND' ['COMMAND' …]
//! ```

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use cofferdam_cell::protocol::{Event, Exec, Request, Stdio};
use cofferdam_cell::{Cell, launch, run_if_launched};
use cofferdam_sandbox::Plan;
use cofferdam_spec::{Command, HostImage, Limits, Policy};

fn main() -> ExitCode {
    if let Some(code) = run_if_launched() {
        return code;
    }
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let workspace = arguments.next().ok_or("usage: standalone DIRECTORY COMMAND...")?;
    let image = HostImage::parse(include_str!("../../../sandbox-images/host/image.toml"))?;
    let home = std::env::temp_dir().join(format!("standalone-home-{}", std::process::id()));
    let plan = Plan::prepare(Path::new(&workspace), &home, image, Policy::default())?;
    let begin = Instant::now();
    let cell = launch(&plan)?;
    eprintln!("cell in {:?}: {:?}", begin.elapsed(), cell.enforcement);
    for (call, script) in (1..).zip(arguments) {
        let begin = Instant::now();
        eprintln!("$ {script}");
        execute(&cell, call, &script)?;
        eprintln!("[{:?}]", begin.elapsed());
    }
    drop(cell);
    std::fs::remove_dir_all(home)?;
    Ok(())
}

fn execute(cell: &Cell, call: u64, script: &str) -> Result<(), Box<dyn Error>> {
    let env = BTreeMap::from([
        ("PATH".to_owned(), "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin".to_owned()),
        ("HOME".to_owned(), "/home/agent".to_owned()),
    ]);
    let argv = ["/bin/bash", "--noprofile", "--norc", "-c", script].map(str::to_owned).to_vec();
    cell.init.send(
        &Request::Exec(Box::new(Exec {
            call,
            session: "standalone".to_owned(),
            command: Command::new(argv, &env, [], String::new())?,
            limits: Limits { wall: Some(Duration::from_secs(20)), ..Limits::default() },
            wall_bounds_tree: true,
            grace: Duration::from_secs(1),
            stdio: Stdio::Pipes { stdin: false },
            workspace_read_only: false,
        })),
        &[],
    )?;
    loop {
        let received = match cell.init.receive() {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            other => other?.ok_or("the cell is gone")?,
        };
        match received.message {
            Event::Started { .. } => {
                // One stream at a time is enough for a demonstration.
                for descriptor in received.descriptors {
                    let mut file = File::from(descriptor);
                    let mut buffer = [0; 65536];
                    loop {
                        match file.read(&mut buffer) {
                            Ok(0) => break,
                            Ok(length) => std::io::stdout().write_all(&buffer[..length])?,
                            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                                std::thread::sleep(Duration::from_millis(1));
                            }
                            Err(error) => return Err(error.into()),
                        }
                    }
                }
            }
            // What an earlier call left behind has ended.
            Event::TreeGone { .. } => (),
            Event::Exited { status, background, killed, .. } => {
                eprintln!("{status:?} killed {killed:?} background {background}");
                return Ok(());
            }
            event => return Err(format!("{event:?}").into()),
        }
    }
}
