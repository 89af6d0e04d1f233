//! Locks on files (`flock(2)`): the kernel gives them back when their holder dies.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

/// Opens a lock's file, making it where it does not exist.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
}

/// What came of waiting for a lock.
#[derive(Debug)]
pub(crate) enum Wait {
    /// It is held now, for as long as this file (or a copy of it in a child) is open.
    Held(File),
    /// Somebody else still holds it.
    TimedOut,
}

/// Waits for a lock, at most `limit`. The kernel has no timed wait, so a thread waits; when the
/// time is over it stays behind until the lock comes free or the process ends.
pub(crate) fn wait(file: File, limit: Duration) -> io::Result<Wait> {
    match file.try_lock() {
        Ok(()) => return Ok(Wait::Held(file)),
        Err(TryLockError::WouldBlock) => {}
        Err(TryLockError::Error(error)) => return Err(error),
    }
    let (sender, receiver) = mpsc::channel();
    std::thread::Builder::new().name("lock".to_owned()).spawn(move || {
        // A receiver that has gone drops the file, and with it the lock.
        let _ = sender.send(file.lock().map(|()| file));
    })?;
    match receiver.recv_timeout(limit) {
        Ok(result) => result.map(Wait::Held),
        Err(_) => Ok(Wait::TimedOut),
    }
}

/// Writes who holds the lock.
pub(crate) fn sign(file: &mut File) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())
}

/// Who holds the lock, if the holder has signed.
pub(crate) fn holder(file: &mut File) -> io::Result<Option<u32>> {
    let mut text = String::new();
    file.rewind()?;
    file.read_to_string(&mut text)?;
    Ok(text.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_lock_is_waited_for_and_then_taken() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let Wait::Held(mut first) = wait(open(&path).unwrap(), Duration::ZERO).unwrap() else {
            panic!("a free lock was not taken");
        };
        sign(&mut first).unwrap();
        let mut second = open(&path).unwrap();
        assert_eq!(holder(&mut second).unwrap(), Some(std::process::id()));
        let short = Duration::from_millis(20);
        assert!(matches!(wait(open(&path).unwrap(), short).unwrap(), Wait::TimedOut));
        let waiter = std::thread::spawn(move || wait(second, Duration::from_secs(60)).unwrap());
        drop(first);
        assert!(matches!(waiter.join().unwrap(), Wait::Held(_)));
    }
}
