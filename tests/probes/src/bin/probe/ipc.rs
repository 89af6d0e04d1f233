//! Attempts on System V shared memory and POSIX message queues.

use std::ffi::CString;
use std::ptr;

use super::{Outcome, check, done};

const SIZE: usize = 4096;

fn key(text: &str) -> i32 {
    text.parse().expect("a key is a number")
}

fn name(text: &str) -> CString {
    CString::new(text).expect("an argument holds no NUL")
}

pub(crate) fn shm_create(text: &str) -> Outcome {
    let flags = libc::IPC_CREAT | libc::IPC_EXCL | 0o666;
    // SAFETY: no pointer is passed.
    check(unsafe { libc::shmget(key(text), SIZE, flags) }.into())?;
    done()
}

pub(crate) fn shm_get(text: &str) -> Outcome {
    // SAFETY: no pointer is passed.
    check(unsafe { libc::shmget(key(text), SIZE, 0o600) }.into())?;
    done()
}

pub(crate) fn shm_remove(text: &str) -> Outcome {
    // SAFETY: no pointer is passed.
    let id = check(unsafe { libc::shmget(key(text), SIZE, 0o600) }.into())?;
    // SAFETY: IPC_RMID reads no buffer.
    check(unsafe { libc::shmctl(id as i32, libc::IPC_RMID, ptr::null_mut()) }.into())?;
    done()
}

pub(crate) fn mq_create(text: &str) -> Outcome {
    let flags = libc::O_CREAT | libc::O_EXCL | libc::O_RDWR;
    let name = name(text);
    // SAFETY: the name is a live C string; a null attribute means the default.
    let result =
        unsafe { libc::mq_open(name.as_ptr(), flags, 0o666, ptr::null_mut::<libc::mq_attr>()) };
    check(result.into())?;
    done()
}

pub(crate) fn mq_open(text: &str) -> Outcome {
    let name = name(text);
    // SAFETY: the name is a live C string.
    check(unsafe { libc::mq_open(name.as_ptr(), libc::O_RDONLY) }.into())?;
    done()
}

pub(crate) fn mq_unlink(text: &str) -> Outcome {
    let name = name(text);
    // SAFETY: the name is a live C string.
    check(unsafe { libc::mq_unlink(name.as_ptr()) }.into())?;
    done()
}
