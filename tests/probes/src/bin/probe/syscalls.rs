//! Every system call that the filter denies, called raw, with arguments that do nothing: the test
//! compares what they give in a cell and outside.

use std::process::{self, ExitCode};

use libc::c_long;

use super::{Outcome, done, last_errno, show};

/// A call: its name, its number, up to six arguments.
struct Call {
    name: &'static str,
    number: c_long,
    arguments: [i64; 6],
}

const BAD: i64 = -1;
/// A time with too many microseconds, so that setting the clock fails before any permission.
static BAD_TIME: [i64; 2] = [0, 2_000_000];
static ZEROS: [u64; 64] = [0; 64];

macro_rules! calls {
    ($($name:literal $number:expr, [$($argument:expr),*];)+) => {
        vec![$({
            #[allow(unused_mut, reason = "some calls have no argument")]
            let mut arguments = [0_i64; 6];
            #[allow(unused_variables, unused_mut, unused_assignments, reason = "as above")]
            let mut index = 0;
            $(
                arguments[index] = ($argument) as i64;
                index += 1;
            )*
            let _ = index;
            Call { name: $name, number: $number, arguments }
        }),+]
    };
}

fn table() -> Vec<Call> {
    let zeros = &raw const ZEROS as i64;
    let bad_time = &raw const BAD_TIME as i64;
    let own = i64::from(process::id());
    let empty = c"".as_ptr() as i64;
    let nowhere = c"/nonexistent/cofferdam".as_ptr() as i64;
    let reboot_magic_that_is_wrong = 0;
    calls! {
        "clone3" libc::SYS_clone3, [0, 0];
        "unshare" libc::SYS_unshare, [libc::CLONE_NEWUSER];
        "setns" libc::SYS_setns, [BAD, 0];
        "mount" libc::SYS_mount, [0, 0, 0, 0, 0];
        "umount2" libc::SYS_umount2, [0, 0];
        "pivot_root" libc::SYS_pivot_root, [0, 0];
        "chroot" libc::SYS_chroot, [0];
        "open_tree" libc::SYS_open_tree, [BAD, 0, 0];
        "open_tree_attr" 467, [BAD, 0, 0, 0, 0];
        "move_mount" libc::SYS_move_mount, [BAD, 0, BAD, 0, 0];
        "fsopen" libc::SYS_fsopen, [0, 0];
        "fsconfig" libc::SYS_fsconfig, [BAD, 0, 0, 0, 0];
        "fsmount" libc::SYS_fsmount, [BAD, 0, 0];
        "fspick" libc::SYS_fspick, [BAD, 0, 0];
        "mount_setattr" libc::SYS_mount_setattr, [BAD, 0, 0, 0, 0];
        "io_uring_setup" libc::SYS_io_uring_setup, [0, 0];
        "io_uring_enter" libc::SYS_io_uring_enter, [BAD, 0, 0, 0, 0, 0];
        "io_uring_register" libc::SYS_io_uring_register, [BAD, 0, 0, 0];
        "ptrace" libc::SYS_ptrace, [libc::PTRACE_TRACEME, 0, 0, 0];
        "process_vm_readv" libc::SYS_process_vm_readv, [own, 0, 0, 0, 0, 0];
        "process_vm_writev" libc::SYS_process_vm_writev, [own, 0, 0, 0, 0, 0];
        "kcmp" libc::SYS_kcmp, [own, own, 1, 0, 0];
        "pidfd_getfd" libc::SYS_pidfd_getfd, [BAD, 0, 0];
        "process_madvise" libc::SYS_process_madvise, [BAD, 0, 0, 0, 0];
        "process_mrelease" libc::SYS_process_mrelease, [BAD, 0];
        "prlimit64 of another" libc::SYS_prlimit64, [own, libc::RLIMIT_NOFILE, 0, 0];
        "setpriority of another" libc::SYS_setpriority, [libc::PRIO_PROCESS, own, 0];
        "setpriority of a group" libc::SYS_setpriority, [libc::PRIO_PGRP, 0, 0];
        "sched_setscheduler of another" libc::SYS_sched_setscheduler, [own, 9999, 0];
        "sched_setparam of another" libc::SYS_sched_setparam, [own, 0];
        "sched_setattr of another" libc::SYS_sched_setattr, [own, 0, 0];
        "ioprio_set of another" libc::SYS_ioprio_set, [1, own, 0xf_0000];
        "io_setup" libc::SYS_io_setup, [0, 0];
        "openat2" libc::SYS_openat2, [BAD, 0, 0, 0];
        "fchmodat2" 452, [BAD, nowhere, 0, 0];
        "keyctl" libc::SYS_keyctl, [0, -3, 0, 0, 0];
        "add_key" libc::SYS_add_key, [0, 0, 0, 0, 0];
        "request_key" libc::SYS_request_key, [0, 0, 0, 0];
        "bpf" libc::SYS_bpf, [9999, 0, 0];
        "perf_event_open" libc::SYS_perf_event_open, [0, 0, 0, 0, 0];
        "userfaultfd" libc::SYS_userfaultfd, [1];
        "open_by_handle_at" libc::SYS_open_by_handle_at, [BAD, 0, 0];
        "name_to_handle_at" libc::SYS_name_to_handle_at, [BAD, 0, 0, 0, 0];
        "kexec_load" libc::SYS_kexec_load, [0, 1000, 0, 0];
        "kexec_file_load" libc::SYS_kexec_file_load, [BAD, BAD, 0, 0, 0xffff_ffff_u32];
        "init_module" libc::SYS_init_module, [0, 0, empty];
        "finit_module" libc::SYS_finit_module, [BAD, empty, 0];
        "delete_module" libc::SYS_delete_module, [nowhere, 0];
        "reboot" libc::SYS_reboot, [reboot_magic_that_is_wrong, 0, 0, 0];
        "swapon" libc::SYS_swapon, [0, 0x7fff_ffff];
        "swapoff" libc::SYS_swapoff, [0];
        "acct" libc::SYS_acct, [nowhere];
        "quotactl" libc::SYS_quotactl, [0xffff_ffff_u32, 0, 0, 0];
        "quotactl_fd" 443, [BAD, 0xffff_ffff_u32, 0, 0];
        "iopl" libc::SYS_iopl, [4];
        "ioperm" libc::SYS_ioperm, [0xffff_ffff_u32, 1, 0];
        "settimeofday" libc::SYS_settimeofday, [bad_time, 0];
        "clock_settime" libc::SYS_clock_settime, [9999, zeros];
        "clock_adjtime" libc::SYS_clock_adjtime, [9999, zeros];
        "adjtimex" libc::SYS_adjtimex, [0];
        "sethostname" libc::SYS_sethostname, [0, BAD];
        "setdomainname" libc::SYS_setdomainname, [0, BAD];
        "syslog" libc::SYS_syslog, [99, 0, 0];
        "nfsservctl" libc::SYS_nfsservctl, [0, 0, 0];
        "lookup_dcookie" libc::SYS_lookup_dcookie, [0, 0, 0];
        "vhangup" libc::SYS_vhangup, [];
        "_sysctl" libc::SYS__sysctl, [0];
        "uselib" libc::SYS_uselib, [0];
        "ustat" libc::SYS_ustat, [0, 0];
        "sysfs" libc::SYS_sysfs, [3];
        "modify_ldt" libc::SYS_modify_ldt, [0, 0, 0];
        "move_pages" libc::SYS_move_pages, [0, 0, 0, 0, 0, 0];
        "migrate_pages" libc::SYS_migrate_pages, [0, 0, 0, 0];
        "mbind" libc::SYS_mbind, [0, 0, 0, 0, 0, 0];
        "set_mempolicy" libc::SYS_set_mempolicy, [0, 0, 0];
        "personality PER_LINUX32" libc::SYS_personality, [8];
        "personality ADDR_NO_RANDOMIZE" libc::SYS_personality, [0x0004_0000];
        "ioctl TIOCSTI" libc::SYS_ioctl, [BAD, libc::TIOCSTI, 0];
        "ioctl TIOCSTI, high bits set" libc::SYS_ioctl, [BAD, libc::TIOCSTI | 1 << 32, 0];
        "ioctl TIOCLINUX" libc::SYS_ioctl, [BAD, 0x541c, 0];
        "ioctl TIOCSETD" libc::SYS_ioctl, [BAD, 0x5423, 0];
        "sendto MSG_FASTOPEN" libc::SYS_sendto, [BAD, 0, 0, libc::MSG_FASTOPEN, 0, 0];
        "sendmsg MSG_FASTOPEN" libc::SYS_sendmsg, [BAD, zeros, libc::MSG_FASTOPEN];
        "sendmmsg MSG_FASTOPEN" libc::SYS_sendmmsg, [BAD, zeros, 1, libc::MSG_FASTOPEN];
        "setsockopt TCP_FASTOPEN_CONNECT" libc::SYS_setsockopt, [BAD, libc::IPPROTO_TCP, 30, zeros, 4];
        "fanotify_init" libc::SYS_fanotify_init, [0x200, 0];
        "memfd_secret" libc::SYS_memfd_secret, [0];
        "seccomp NEW_LISTENER" libc::SYS_seccomp, [1, 8, 0];
        "getpid by its x32 number" 0x4000_0000 | libc::SYS_getpid, [];
    }
}

/// Makes every call, each in a child of its own, and prints `name: result`.
pub(crate) fn all() -> ExitCode {
    for call in table() {
        let [a, b, c, d, e, f] = call.arguments;
        in_child(call.name, || {
            // SAFETY: every argument is a number, null, or the address of one of the statics
            // above; the child ends right after, whatever the call did to it.
            let result = unsafe { libc::syscall(call.number, a, b, c, d, e, f) };
            if result < 0 { Err(last_errno()) } else { done() }
        });
    }
    for (name, flag) in [
        ("clone NEWNS", libc::CLONE_NEWNS),
        ("clone NEWCGROUP", libc::CLONE_NEWCGROUP),
        ("clone NEWUTS", libc::CLONE_NEWUTS),
        ("clone NEWIPC", libc::CLONE_NEWIPC),
        ("clone NEWUSER", libc::CLONE_NEWUSER),
        ("clone NEWPID", libc::CLONE_NEWPID),
        ("clone NEWNET", libc::CLONE_NEWNET),
    ] {
        in_child(name, || {
            let flags = i64::from(flag | libc::CLONE_NEWUSER | libc::SIGCHLD);
            // SAFETY: without CLONE_VM and without a stack this is a fork.
            match unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) } {
                0 => process::exit(0),
                -1 => Err(last_errno()),
                _ => done(),
            }
        });
    }
    ExitCode::SUCCESS
}

/// Runs `attempt` in a child in a session of its own and prints what it gave; a signal that ends
/// the child is printed by its number.
fn in_child(name: &str, attempt: impl FnOnce() -> Outcome) {
    // SAFETY: the process has one thread.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: no pointer is passed. Without a terminal, vhangup reaches nothing.
        unsafe { libc::setsid() };
        let outcome = attempt();
        println!("{name}: {}", show(outcome));
        process::exit(0);
    }
    let mut status = 0;
    // SAFETY: `status` is live.
    if child < 0 || unsafe { libc::waitpid(child, &mut status, 0) } != child {
        println!("{name}: could not fork");
    } else if libc::WIFSIGNALED(status) {
        println!("{name}: signal {}", libc::WTERMSIG(status));
    }
}

/// Asks for the process id through the 32-bit entry of the kernel.
pub(crate) fn int80() -> Outcome {
    const GETPID_I386: i64 = 20;
    let result: i64;
    // SAFETY: getpid reads and writes no memory; the entry clobbers the registers named.
    unsafe {
        std::arch::asm!(
            "int 0x80",
            inlateout("rax") GETPID_I386 => result,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _,
        );
    }
    if result == i64::from(process::id()) { done() } else { Err(result as i32) }
}
