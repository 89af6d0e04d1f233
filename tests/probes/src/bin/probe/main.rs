//! `probe`: one program with a subcommand for each forbidden thing. It prints `ok` or the name of
//! the errno, and exits 0 when the attempt could be made at all; the tests judge the result.

mod files;
mod flood;
mod ipc;
mod network;
mod processes;
mod races;
mod syscalls;

use std::io;
use std::process::ExitCode;

use cofferdam_probes::errno_name;

/// What an attempt gave.
type Outcome = Result<String, i32>;

fn done() -> Outcome {
    Ok("ok".to_owned())
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(0)
}

fn last_errno() -> i32 {
    errno(&io::Error::last_os_error())
}

/// A system call's result as an outcome.
fn check(result: i64) -> Result<i64, i32> {
    if result < 0 { Err(last_errno()) } else { Ok(result) }
}

fn show(outcome: Outcome) -> String {
    outcome.unwrap_or_else(errno_name)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["syscalls"] => return syscalls::all(),
        ["sockets"] => return network::families(),
        ["int80"] => syscalls::int80(),
        ["fds"] => return files::descriptors(),
        ["open", path] => files::open(path, libc::O_RDONLY),
        ["write", path] => files::open(path, libc::O_WRONLY),
        ["create", path] => files::open(path, libc::O_WRONLY | libc::O_CREAT),
        ["rename", from, to] => files::rename(from, to),
        ["link", from, to] => files::link(from, to),
        ["mknod", path] => files::mknod(path),
        ["remount", path] => files::remount(path),
        ["unmount", path] => files::unmount(path),
        ["connect-unix", address] => network::connect_unix(address),
        ["connect-tcp", address] => network::connect_tcp(address),
        ["send-udp", address, text] => network::send_udp(address, text),
        ["fast-open", address] => network::fast_open(address),
        ["shm-create", key] => ipc::shm_create(key),
        ["shm-get", key] => ipc::shm_get(key),
        ["shm-remove", key] => ipc::shm_remove(key),
        ["mq-create", name] => ipc::mq_create(name),
        ["mq-open", name] => ipc::mq_open(name),
        ["mq-unlink", name] => ipc::mq_unlink(name),
        ["kill", pid, signal] => processes::kill(pid, signal),
        ["limit", pid] => processes::limit(pid),
        ["trace-me"] => processes::trace_me(),
        ["trace", pid] => processes::trace(pid),
        ["push-input"] => processes::push_input(),
        ["exchange", first, second, turns, end] => races::exchange(first, second, turns, end),
        ["replace", directory, target, turns, end] => races::replace(directory, target, turns, end),
        ["churn", directory, files] => races::churn(directory, files),
        ["bytes", total, seed] => flood::bytes(total, seed),
        ["zombies", count] => flood::zombies(count),
        ["fork-bomb", host_namespace] => flood::fork_bomb(host_namespace),
        _ => {
            eprintln!("probe: unknown attempt {words:?}");
            return ExitCode::from(64);
        }
    };
    println!("{}", show(outcome));
    ExitCode::SUCCESS
}
