//! Changes of the file system that race with whoever works in it.

use std::ffi::CString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::{Outcome, check, done, errno};

/// Goes on for at least `turns` turns and until `end` exists, and gives the number of turns.
fn race(turns: &str, end: &str, mut turn: impl FnMut() -> Result<(), i32>) -> Outcome {
    let least: u64 = turns.parse().expect("a number");
    let mut done = 0;
    while done < least || !Path::new(end).exists() {
        turn()?;
        done += 1;
    }
    Ok(done.to_string())
}

/// Exchanges two entries in one step, again and again. An even number of turns ends as it began.
pub(crate) fn exchange(first: &str, second: &str, turns: &str, end: &str) -> Outcome {
    let text = |path: &str| CString::new(path).expect("an argument holds no NUL");
    let (first, second) = (text(first), text(second));
    let once = || {
        // SAFETY: both paths are live C strings.
        let result = unsafe {
            libc::renameat2(
                libc::AT_FDCWD,
                first.as_ptr(),
                libc::AT_FDCWD,
                second.as_ptr(),
                libc::RENAME_EXCHANGE,
            )
        };
        check(result.into()).map(|_| ())
    };
    race(turns, end, || {
        once()?;
        once()
    })
}

/// Moves a directory aside, puts a symlink to `target` in its place, and takes that back, again and
/// again. What somebody else made or removed in between is none of its business.
pub(crate) fn replace(directory: &str, target: &str, turns: &str, end: &str) -> Outcome {
    let aside = format!("{directory}.aside");
    race(turns, end, || {
        fs::rename(directory, &aside).map_err(|error| errno(&error))?;
        // Fails where somebody made the name meanwhile; that is another way to be replaced.
        let _ = symlink(target, directory);
        restore(&aside, directory)
    })
}

/// Puts a directory back, whatever stands in its place by now.
fn restore(aside: &str, directory: &str) -> Result<(), i32> {
    let mut last = 0;
    for _ in 0..1000 {
        let _ = fs::remove_file(directory).or_else(|_| fs::remove_dir_all(directory));
        match fs::rename(aside, directory) {
            Ok(()) => return Ok(()),
            Err(error) => last = errno(&error),
        }
    }
    Err(last)
}

/// Makes that many empty files in a directory and removes each at once: two changes a file.
pub(crate) fn churn(directory: &str, files: &str) -> Outcome {
    let files: u64 = files.parse().expect("a number");
    for number in 0..files {
        let path = format!("{directory}/{number}");
        fs::File::create_new(&path).map_err(|error| errno(&error))?;
        fs::remove_file(&path).map_err(|error| errno(&error))?;
    }
    done()
}
