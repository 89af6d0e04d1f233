//! Much of something: bytes, zombies, processes. What could hurt a host refuses to run on one.

use std::io::{self, Write};
use std::{fs, process};

use cofferdam_probes::Pattern;

use super::{Outcome, done, errno};

/// Writes the first `total` bytes of a pattern, and nothing else, to standard output.
pub(crate) fn bytes(total: &str, seed: &str) -> ! {
    let total: u64 = total.parse().expect("a number");
    let pattern = Pattern::new(seed.parse().expect("a number"));
    let mut buffer = vec![0; 64 * 1024];
    let mut offset = 0;
    let mut output = io::stdout().lock();
    while offset < total {
        let length = buffer.len().min((total - offset) as usize);
        pattern.fill(offset, &mut buffer[..length]);
        if output.write_all(&buffer[..length]).is_err() {
            process::exit(1);
        }
        offset += length as u64;
    }
    let flushed = output.flush();
    process::exit(i32::from(flushed.is_err()))
}

/// Makes children that end at once and waits for none.
pub(crate) fn zombies(count: &str) -> Outcome {
    let count: u32 = count.parse().expect("a number");
    for _ in 0..count {
        // SAFETY: the process has one thread; the child ends at once.
        match unsafe { libc::fork() } {
            0 => process::exit(0),
            -1 => return Err(super::last_errno()),
            _ => {}
        }
    }
    done()
}

/// Forks without end, in a cell only: `host_namespace` is the host's `readlink /proc/self/ns/pid`.
pub(crate) fn fork_bomb(host_namespace: &str) -> Outcome {
    assert!(host_namespace.starts_with("pid:["), "the host's pid namespace is needed");
    let own = fs::read_link("/proc/self/ns/pid").map_err(|error| errno(&error))?;
    if own.as_os_str() == host_namespace {
        eprintln!("probe: refused outside of a cell");
        process::exit(65);
    }
    loop {
        // SAFETY: the process has one thread; parent and child do the same.
        unsafe { libc::fork() };
    }
}
