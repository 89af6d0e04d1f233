//! Errnos by name, as the tests compare them.

/// The name of `errno` in `errno.h`, or its number where the table has none.
pub fn errno_name(errno: i32) -> String {
    TABLE
        .iter()
        .find(|(number, _)| *number == errno)
        .map_or_else(|| format!("errno-{errno}"), |(_, name)| (*name).to_owned())
}

macro_rules! table {
    ($($name:ident)+) => {
        const TABLE: &[(i32, &str)] = &[$((libc::$name, stringify!($name))),+];
    };
}

table! {
    EPERM ENOENT ESRCH EINTR EIO ENXIO E2BIG ENOEXEC EBADF ECHILD EAGAIN ENOMEM EACCES EFAULT
    ENOTBLK EBUSY EEXIST EXDEV ENODEV ENOTDIR EISDIR EINVAL ENFILE EMFILE ENOTTY ETXTBSY EFBIG
    ENOSPC ESPIPE EROFS EMLINK EPIPE EDOM ERANGE EDEADLK ENAMETOOLONG ENOLCK ENOSYS ENOTEMPTY
    ELOOP ENODATA EPROTO EOVERFLOW EUSERS ENOTSOCK EDESTADDRREQ EMSGSIZE EPROTOTYPE ENOPROTOOPT
    EPROTONOSUPPORT ESOCKTNOSUPPORT EOPNOTSUPP EPFNOSUPPORT EAFNOSUPPORT EADDRINUSE
    EADDRNOTAVAIL ENETDOWN ENETUNREACH ECONNABORTED ECONNRESET ENOBUFS EISCONN ENOTCONN ETIMEDOUT
    ECONNREFUSED EHOSTUNREACH EALREADY EINPROGRESS ESTALE EDQUOT ENOKEY EKEYEXPIRED EKEYREVOKED
    EKEYREJECTED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_errnos_have_their_name_and_others_their_number() {
        assert_eq!(errno_name(libc::EROFS), "EROFS");
        assert_eq!(errno_name(4095), "errno-4095");
    }
}
