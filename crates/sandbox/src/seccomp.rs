//! The seccomp filter: a table of refused system calls with reasons, compiled to a search tree.
//!
//! Agents run anything, so the default is to allow; what is refused gets an errno that programs
//! know how to take, never a kill. The reason stands beside each entry.
//! Ours and not a library's, because one program must answer with several errnos, refuse numbers
//! that it does not know, and stay a tree: each `exec` pays for the instructions on its path.

use cofferdam_sys::Instruction;
use sha2::{Digest, Sha256};

/// A condition on one argument: `(argument & mask) == value`, on the low 32 bits, which is all
/// that the kernel reads of the arguments that the table names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Test {
    argument: u8,
    mask: u32,
    value: u32,
    equal: bool,
}

const fn is(argument: u8, value: u32) -> Test {
    Test { argument, mask: u32::MAX, value, equal: true }
}

const fn is_not(argument: u8, value: u32) -> Test {
    Test { argument, mask: u32::MAX, value, equal: false }
}

const fn has_any(argument: u8, mask: u32) -> Test {
    Test { argument, mask, value: 0, equal: false }
}

const fn masked(argument: u8, mask: u32, value: u32) -> Test {
    Test { argument, mask, value, equal: true }
}

/// When a call is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    Always,
    /// Unless the policy says `debug`.
    NotDebugging,
    /// For commands, not for the toolbox, whose own code uses it.
    OfCommands,
    /// When all tests of any one clause hold.
    Any(&'static [&'static [Test]]),
}

/// One refused system call.
#[derive(Debug, Clone, Copy)]
struct Rule {
    number: i64,
    errno: i32,
    when: When,
}

const fn rule(number: i64, errno: i32, when: When) -> Rule {
    Rule { number, errno, when }
}

/// CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET.
const NEW_NAMESPACES: u32 = 0x7E02_0080;
const MSG_FASTOPEN: u32 = 0x2000_0000;
const RAW: u32 = libc::SOCK_RAW as u32;
const TYPE_MASK: u32 = 0xf;
const UNIX: u32 = libc::AF_UNIX as u32;
const INET: u32 = libc::AF_INET as u32;
const INET6: u32 = libc::AF_INET6 as u32;
const NETLINK: u32 = libc::AF_NETLINK as u32;

/// Sockets of the families UNIX, INET and INET6 without raw, MPTCP, SCTP and SMC, and NETLINK for
/// routes only. A network namespace does not isolate AF_VSOCK, and the others are kernel code that
/// no agent needs.
const SOCKETS: When = When::Any(&[
    &[is_not(0, UNIX), is_not(0, INET), is_not(0, INET6), is_not(0, NETLINK)],
    &[is(0, NETLINK), is_not(2, 0)],
    &[is(0, INET), masked(1, TYPE_MASK, RAW)],
    &[is(0, INET6), masked(1, TYPE_MASK, RAW)],
    &[is(0, INET), is(2, libc::IPPROTO_MPTCP as u32)],
    &[is(0, INET6), is(2, libc::IPPROTO_MPTCP as u32)],
    &[is(0, INET), is(2, libc::IPPROTO_SCTP as u32)],
    &[is(0, INET6), is(2, libc::IPPROTO_SCTP as u32)],
    &[is(0, INET), is(2, IPPROTO_SMC)],
    &[is(0, INET6), is(2, IPPROTO_SMC)],
]);
const IPPROTO_SMC: u32 = 256;
/// From `linux/tcp.h`: data in the SYN passes Landlock's connect rule on old kernels.
const TCP_FASTOPEN_CONNECT: u32 = 30;
const SECCOMP_SET_MODE_FILTER: u32 = 1;
const SECCOMP_FILTER_FLAG_NEW_LISTENER: u32 = 8;
const TIOCSETD: u32 = 0x5423;
const SET_ID_BITS: u32 = libc::S_ISUID | libc::S_ISGID;
/// O_CREAT, and the bit of O_TMPFILE that is not O_DIRECTORY: with them `open` reads its mode.
const CREATES: u32 = (libc::O_CREAT | (libc::O_TMPFILE & !libc::O_DIRECTORY)) as u32;
const PRIO_PROCESS: u32 = libc::PRIO_PROCESS;
const IOPRIO_WHO_PROCESS: u32 = 1;

const EPERM: i32 = libc::EPERM;
const ENOSYS: i32 = libc::ENOSYS;

/// Linux 6.15; the libc crate has no name for it.
const SYS_OPEN_TREE_ATTR: i64 = 467;
/// Linux 6.6.
const SYS_FCHMODAT2: i64 = 452;

/// Newest system call of the table (`file_setattr`, Linux 6.17): numbers above it answer ENOSYS,
/// so that a newer kernel does not widen what a cell reaches.
const NEWEST: u32 = 469;
/// Bit of the x32 numbers.
const X32: u32 = 0x4000_0000;

#[rustfmt::skip]
const RULES: &[Rule] = &[
    // Its flags live in memory, which a filter cannot read; ENOSYS makes every libc use clone.
    rule(libc::SYS_clone3, ENOSYS, When::Always),
    // A user namespace gives capabilities over fresh kernel objects: most local exploits start so.
    rule(libc::SYS_clone, EPERM, When::Any(&[&[has_any(0, NEW_NAMESPACES)]])),
    rule(libc::SYS_unshare, EPERM, When::Always),
    rule(libc::SYS_setns, EPERM, When::Always),
    // The mount table is the wall of the cell.
    rule(libc::SYS_mount, EPERM, When::Always),
    rule(libc::SYS_umount2, EPERM, When::Always),
    rule(libc::SYS_pivot_root, EPERM, When::Always),
    rule(libc::SYS_chroot, EPERM, When::Always),
    rule(libc::SYS_open_tree, ENOSYS, When::Always),
    rule(SYS_OPEN_TREE_ATTR, ENOSYS, When::Always),
    rule(libc::SYS_move_mount, ENOSYS, When::Always),
    rule(libc::SYS_fsopen, ENOSYS, When::Always),
    rule(libc::SYS_fsconfig, ENOSYS, When::Always),
    rule(libc::SYS_fsmount, ENOSYS, When::Always),
    rule(libc::SYS_fspick, ENOSYS, When::Always),
    rule(libc::SYS_mount_setattr, ENOSYS, When::Always),
    // Its operations are not seen by a filter.
    rule(libc::SYS_io_uring_setup, ENOSYS, When::Always),
    rule(libc::SYS_io_uring_enter, ENOSYS, When::Always),
    rule(libc::SYS_io_uring_register, ENOSYS, When::Always),
    // Taking over a sibling, or stealing its descriptors.
    rule(libc::SYS_ptrace, EPERM, When::NotDebugging),
    rule(libc::SYS_process_vm_readv, EPERM, When::NotDebugging),
    rule(libc::SYS_process_vm_writev, EPERM, When::NotDebugging),
    rule(libc::SYS_kcmp, EPERM, When::Always),
    rule(libc::SYS_pidfd_getfd, EPERM, When::Always),
    rule(libc::SYS_process_madvise, EPERM, When::Always),
    rule(libc::SYS_process_mrelease, EPERM, When::Always),
    // Neither Landlock nor PR_SET_DUMPABLE covers the limits of another process, init's included.
    rule(libc::SYS_prlimit64, EPERM, When::Any(&[&[is_not(0, 0)]])),
    // Nor its priority: a command could starve init, which holds its deadline, and other sessions.
    // (Affinity stays free, because libraries pin other threads of their own; init undoes it.)
    rule(libc::SYS_setpriority, EPERM, When::Any(&[&[is_not(0, PRIO_PROCESS)], &[is_not(1, 0)]])),
    rule(libc::SYS_sched_setscheduler, EPERM, When::Any(&[&[is_not(0, 0)]])),
    rule(libc::SYS_sched_setparam, EPERM, When::Any(&[&[is_not(0, 0)]])),
    rule(libc::SYS_sched_setattr, EPERM, When::Any(&[&[is_not(0, 0)]])),
    rule(libc::SYS_ioprio_set, EPERM, When::Any(&[&[is_not(0, IOPRIO_WHO_PROCESS)], &[is_not(1, 0)]])),
    // A set-user-id file in the workspace is root's, or the owner's, for whoever reaches it on the
    // host. The mode of the last two lies in memory, which a filter cannot read.
    #[cfg(target_arch = "x86_64")]
    rule(libc::SYS_chmod, EPERM, When::Any(&[&[has_any(1, SET_ID_BITS)]])),
    rule(libc::SYS_fchmod, EPERM, When::Any(&[&[has_any(1, SET_ID_BITS)]])),
    rule(libc::SYS_fchmodat, EPERM, When::Any(&[&[has_any(2, SET_ID_BITS)]])),
    #[cfg(target_arch = "x86_64")]
    rule(libc::SYS_creat, EPERM, When::Any(&[&[has_any(1, SET_ID_BITS)]])),
    #[cfg(target_arch = "x86_64")]
    rule(libc::SYS_mknod, EPERM, When::Any(&[&[has_any(1, SET_ID_BITS)]])),
    rule(libc::SYS_mknodat, EPERM, When::Any(&[&[has_any(2, SET_ID_BITS)]])),
    #[cfg(target_arch = "x86_64")]
    rule(libc::SYS_open, EPERM, When::Any(&[&[has_any(1, CREATES), has_any(2, SET_ID_BITS)]])),
    rule(libc::SYS_openat, EPERM, When::Any(&[&[has_any(2, CREATES), has_any(3, SET_ID_BITS)]])),
    rule(SYS_FCHMODAT2, ENOSYS, When::OfCommands),
    rule(libc::SYS_openat2, ENOSYS, When::OfCommands),
    // Contexts of asynchronous I/O are counted for the whole host.
    rule(libc::SYS_io_setup, ENOSYS, When::Always),
    // Keyrings belong to a user, not to a namespace; request_key runs a helper outside.
    rule(libc::SYS_keyctl, EPERM, When::Always),
    rule(libc::SYS_add_key, EPERM, When::Always),
    rule(libc::SYS_request_key, EPERM, When::Always),
    // Large and often attacked.
    rule(libc::SYS_bpf, EPERM, When::Always),
    rule(libc::SYS_perf_event_open, EPERM, When::Always),
    rule(libc::SYS_userfaultfd, EPERM, When::Always),
    // Files by handle pass every path check.
    rule(libc::SYS_open_by_handle_at, EPERM, When::Always),
    rule(libc::SYS_name_to_handle_at, EPERM, When::Always),
    // For root only, or dead: cheap depth.
    rule(libc::SYS_kexec_load, EPERM, When::Always),
    rule(libc::SYS_kexec_file_load, EPERM, When::Always),
    rule(libc::SYS_init_module, EPERM, When::Always),
    rule(libc::SYS_finit_module, EPERM, When::Always),
    rule(libc::SYS_delete_module, EPERM, When::Always),
    rule(libc::SYS_reboot, EPERM, When::Always),
    rule(libc::SYS_swapon, EPERM, When::Always),
    rule(libc::SYS_swapoff, EPERM, When::Always),
    rule(libc::SYS_acct, EPERM, When::Always),
    rule(libc::SYS_quotactl, EPERM, When::Always),
    rule(libc::SYS_quotactl_fd, EPERM, When::Always),
    rule(libc::SYS_settimeofday, EPERM, When::Always),
    rule(libc::SYS_clock_settime, EPERM, When::Always),
    rule(libc::SYS_clock_adjtime, EPERM, When::Always),
    rule(libc::SYS_adjtimex, EPERM, When::Always),
    rule(libc::SYS_sethostname, EPERM, When::Always),
    rule(libc::SYS_setdomainname, EPERM, When::Always),
    rule(libc::SYS_syslog, EPERM, When::Always),
    rule(libc::SYS_nfsservctl, EPERM, When::Always),
    rule(libc::SYS_lookup_dcookie, EPERM, When::Always),
    rule(libc::SYS_vhangup, EPERM, When::Always),
    #[cfg(target_arch = "x86_64")]
    rule(libc::SYS_iopl, EPERM, When::Always),
    #[cfg(target_arch = "x86_64")]
    rule(libc::SYS_ioperm, EPERM, When::Always),
    #[cfg(target_arch = "x86_64")]
    rule(libc::SYS__sysctl, EPERM, When::Always),
    #[cfg(target_arch = "x86_64")]
    rule(libc::SYS_uselib, EPERM, When::Always),
    #[cfg(target_arch = "x86_64")]
    rule(libc::SYS_ustat, EPERM, When::Always),
    #[cfg(target_arch = "x86_64")]
    rule(libc::SYS_sysfs, EPERM, When::Always),
    #[cfg(target_arch = "x86_64")]
    rule(libc::SYS_modify_ldt, EPERM, When::Always),
    // Pages of other processes.
    rule(libc::SYS_move_pages, EPERM, When::Always),
    rule(libc::SYS_migrate_pages, EPERM, When::Always),
    rule(libc::SYS_mbind, EPERM, When::Always),
    rule(libc::SYS_set_mempolicy, EPERM, When::Always),
    // Odd personalities switch protections off (ADDR_NO_RANDOMIZE among them).
    rule(libc::SYS_personality, EPERM, When::Any(&[&[is_not(0, 0), is_not(0, u32::MAX)]])),
    // Typing into a terminal that somebody else reads (CVE-2017-5226, CVE-2023-28100).
    rule(libc::SYS_ioctl, EPERM, When::Any(&[
        &[is(1, libc::TIOCSTI as u32)],
        &[is(1, libc::TIOCLINUX as u32)],
        &[is(1, TIOCSETD)],
    ])),
    rule(libc::SYS_socket, libc::EAFNOSUPPORT, SOCKETS),
    rule(libc::SYS_socketpair, libc::EAFNOSUPPORT, SOCKETS),
    // Data in the SYN passes Landlock's connect rule (landlock-lsm/linux#41).
    rule(libc::SYS_sendto, EPERM, When::Any(&[&[has_any(3, MSG_FASTOPEN)]])),
    rule(libc::SYS_sendmsg, EPERM, When::Any(&[&[has_any(2, MSG_FASTOPEN)]])),
    rule(libc::SYS_sendmmsg, EPERM, When::Any(&[&[has_any(3, MSG_FASTOPEN)]])),
    rule(libc::SYS_setsockopt, EPERM, When::Any(&[
        &[is(1, libc::IPPROTO_TCP as u32), is(2, TCP_FASTOPEN_CONNECT)],
    ])),
    // Marks on files that cannot even be opened.
    rule(libc::SYS_fanotify_init, EPERM, When::Always),
    rule(libc::SYS_memfd_secret, EPERM, When::Always),
    // Plain filters are for nested sandboxes; a listener could hold its children for ever.
    rule(libc::SYS_seccomp, EPERM, When::Any(&[
        &[is(0, SECCOMP_SET_MODE_FILTER), has_any(1, SECCOMP_FILTER_FLAG_NEW_LISTENER)],
    ])),
];

/// What a call that may change nothing in the workspace is refused besides: Landlock keeps it from
/// writing, creating, removing and renaming, but knows nothing of metadata. The filter knows nothing
/// of paths, so this holds for every file.
#[rustfmt::skip]
const READ_ONLY_RULES: &[Rule] = &[
    #[cfg(target_arch = "x86_64")]
    rule(libc::SYS_chmod, EPERM, When::Always),
    rule(libc::SYS_fchmod, EPERM, When::Always),
    rule(libc::SYS_fchmodat, EPERM, When::Always),
    #[cfg(target_arch = "x86_64")]
    rule(libc::SYS_chown, EPERM, When::Always),
    #[cfg(target_arch = "x86_64")]
    rule(libc::SYS_lchown, EPERM, When::Always),
    rule(libc::SYS_fchown, EPERM, When::Always),
    rule(libc::SYS_fchownat, EPERM, When::Always),
    #[cfg(target_arch = "x86_64")]
    rule(libc::SYS_utime, EPERM, When::Always),
    #[cfg(target_arch = "x86_64")]
    rule(libc::SYS_utimes, EPERM, When::Always),
    #[cfg(target_arch = "x86_64")]
    rule(libc::SYS_futimesat, EPERM, When::Always),
    rule(libc::SYS_utimensat, EPERM, When::Always),
    rule(libc::SYS_setxattr, EPERM, When::Always),
    rule(libc::SYS_lsetxattr, EPERM, When::Always),
    rule(libc::SYS_fsetxattr, EPERM, When::Always),
    rule(libc::SYS_removexattr, EPERM, When::Always),
    rule(libc::SYS_lremovexattr, EPERM, When::Always),
    rule(libc::SYS_fremovexattr, EPERM, When::Always),
    rule(SYS_SETXATTRAT, EPERM, When::Always),
    rule(SYS_REMOVEXATTRAT, EPERM, When::Always),
    rule(SYS_FILE_SETATTR, EPERM, When::Always),
    rule(libc::SYS_ioctl, EPERM, When::Any(&[
        &[is(1, FS_IOC_SETFLAGS)],
        &[is(1, FS_IOC_FSSETXATTR)],
    ])),
];
const FS_IOC_SETFLAGS: u32 = 0x4008_6602;
const FS_IOC_FSSETXATTR: u32 = 0x401c_5820;
/// Linux 6.13.
const SYS_SETXATTRAT: i64 = 463;
const SYS_REMOVEXATTRAT: i64 = 466;
/// Linux 6.17.
const SYS_FILE_SETATTR: i64 = 469;

/// Operations of classic BPF (`linux/filter.h`).
mod op {
    pub(super) const LOAD: u16 = 0x20;
    pub(super) const AND: u16 = 0x54;
    pub(super) const JUMP: u16 = 0x05;
    pub(super) const JUMP_EQUAL: u16 = 0x15;
    pub(super) const JUMP_GREATER: u16 = 0x25;
    pub(super) const JUMP_GREATER_EQUAL: u16 = 0x35;
    pub(super) const RETURN: u16 = 0x06;
}

/// Offsets in `struct seccomp_data`.
const OFFSET_NUMBER: u32 = 0;
const OFFSET_ARCHITECTURE: u32 = 4;
const OFFSET_ARGUMENTS: u32 = 16;

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const KILL: u32 = libc::SECCOMP_RET_KILL_PROCESS;

/// `AUDIT_ARCH_*` of `linux/audit.h`.
#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xC000_003E;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xC000_00B7;

const fn plain(code: u16, operand: u32) -> Instruction {
    Instruction { code, jump_true: 0, jump_false: 0, operand }
}

const fn branch(code: u16, operand: u32, jump_true: u8, jump_false: u8) -> Instruction {
    Instruction { code, jump_true, jump_false, operand }
}

fn refuse(errno: i32) -> Instruction {
    plain(op::RETURN, libc::SECCOMP_RET_ERRNO | errno as u32)
}

/// The filter, ready to install.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    program: Vec<Instruction>,
}

impl Filter {
    /// Compiles the table for init and all commands. With `debug`, processes of one call may trace
    /// each other.
    pub fn of_commands(debug: bool) -> Self {
        Self::of(RULES.iter().filter(|rule| !(debug && rule.when == When::NotDebugging)))
    }

    /// Compiles the table for the toolbox, which runs no code but ours.
    pub fn of_toolbox() -> Self {
        Self::of(RULES.iter().filter(|rule| rule.when != When::OfCommands))
    }

    /// Compiles what a call that may change nothing in the workspace adds to the commands' filter.
    pub fn of_read_only_calls() -> Self {
        Self::of(READ_ONLY_RULES.iter())
    }

    fn of<'a>(rules: impl Iterator<Item = &'a Rule>) -> Self {
        let mut rules: Vec<Rule> = rules.copied().collect();
        rules.sort_by_key(|rule| rule.number);
        let mut program = vec![
            plain(op::LOAD, OFFSET_ARCHITECTURE),
            branch(op::JUMP_EQUAL, ARCHITECTURE, 1, 0),
            plain(op::RETURN, KILL),
            plain(op::LOAD, OFFSET_NUMBER),
            branch(op::JUMP_GREATER_EQUAL, X32, 1, 0),
            branch(op::JUMP_GREATER, NEWEST, 0, 1),
            refuse(ENOSYS),
        ];
        program.extend(tree(&rules));
        Self { program }
    }

    /// The instructions.
    pub fn program(&self) -> &[Instruction] {
        &self.program
    }

    /// The program as the kernel reads it, an array of `struct sock_filter`: what other launchers
    /// take as a file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let bytes = |instruction: &Instruction| {
            let Instruction { code, jump_true, jump_false, operand } = *instruction;
            let ([a, b], [c, d, e, f]) = (code.to_ne_bytes(), operand.to_ne_bytes());
            [a, b, jump_true, jump_false, c, d, e, f]
        };
        self.program.iter().flat_map(bytes).collect()
    }

    /// SHA-256 of [`Filter::to_bytes`].
    pub fn digest(&self) -> [u8; 32] {
        Sha256::digest(self.to_bytes()).into()
    }
}

/// A search tree over sorted rules; every path ends in a return.
fn tree(rules: &[Rule]) -> Vec<Instruction> {
    match rules {
        [] => vec![plain(op::RETURN, ALLOW)],
        [rule] => leaf(rule),
        _ => {
            let (left, right) = rules.split_at(rules.len() / 2);
            let pivot = right[0].number as u32;
            let (left, right) = (tree(left), tree(right));
            let mut program = match u8::try_from(left.len()) {
                Ok(length) => vec![branch(op::JUMP_GREATER_EQUAL, pivot, length, 0)],
                // A conditional jump reaches 255 instructions, an unconditional one all.
                Err(_) => vec![
                    branch(op::JUMP_GREATER_EQUAL, pivot, 0, 1),
                    plain(op::JUMP, left.len() as u32),
                ],
            };
            program.extend(left);
            program.extend(right);
            program
        }
    }
}

fn leaf(rule: &Rule) -> Vec<Instruction> {
    let body = match rule.when {
        When::Always | When::NotDebugging | When::OfCommands => vec![refuse(rule.errno)],
        When::Any(clauses) => {
            let mut body: Vec<_> =
                clauses.iter().flat_map(|tests| clause(tests, rule.errno)).collect();
            body.push(plain(op::RETURN, ALLOW));
            body
        }
    };
    let length = u8::try_from(body.len()).expect("a rule's clauses fit a conditional jump");
    let mut program = vec![branch(op::JUMP_EQUAL, rule.number as u32, 0, length)];
    program.extend(body);
    program.push(plain(op::RETURN, ALLOW));
    program
}

/// Refuses when all tests hold, and falls through to what follows otherwise.
fn clause(tests: &[Test], errno: i32) -> Vec<Instruction> {
    let mut program = vec![refuse(errno)];
    for test in tests.iter().rev() {
        let past = u8::try_from(program.len()).expect("a clause fits a conditional jump");
        let (jump_true, jump_false) = if test.equal { (0, past) } else { (past, 0) };
        let mut head = vec![plain(op::LOAD, OFFSET_ARGUMENTS + 8 * u32::from(test.argument))];
        if test.mask != u32::MAX {
            head.push(plain(op::AND, test.mask));
        }
        head.push(branch(op::JUMP_EQUAL, test.value, jump_true, jump_false));
        head.extend(program);
        program = head;
    }
    program
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What the table says, read slowly: the meaning that the tree must have.
    fn expected(debug: bool, architecture: u32, number: u32, arguments: [u64; 6]) -> u32 {
        if architecture != ARCHITECTURE {
            return KILL;
        }
        let errno = |errno: i32| libc::SECCOMP_RET_ERRNO | errno as u32;
        if number >= X32 || number > NEWEST {
            return errno(ENOSYS);
        }
        let holds = |test: &Test| {
            let argument = arguments[usize::from(test.argument)] as u32;
            ((argument & test.mask) == test.value) == test.equal
        };
        let refused = RULES.iter().find(|rule| {
            rule.number == i64::from(number)
                && match rule.when {
                    When::Always | When::OfCommands => true,
                    When::NotDebugging => !debug,
                    When::Any(clauses) => clauses.iter().any(|tests| tests.iter().all(holds)),
                }
        });
        refused.map_or(ALLOW, |rule| errno(rule.errno))
    }

    /// A classic BPF machine with just the operations that the compiler emits.
    fn run(program: &[Instruction], architecture: u32, number: u32, arguments: [u64; 6]) -> u32 {
        let mut accumulator = 0_u32;
        let mut at = 0;
        loop {
            let Instruction { code, jump_true, jump_false, operand } = program[at];
            at += 1;
            let taken = match code {
                op::LOAD => {
                    accumulator = match operand {
                        OFFSET_NUMBER => number,
                        OFFSET_ARCHITECTURE => architecture,
                        offset => arguments[(offset - OFFSET_ARGUMENTS) as usize / 8] as u32,
                    };
                    continue;
                }
                op::AND => {
                    accumulator &= operand;
                    continue;
                }
                op::JUMP => {
                    at += operand as usize;
                    continue;
                }
                op::RETURN => return operand,
                op::JUMP_EQUAL => accumulator == operand,
                op::JUMP_GREATER => accumulator > operand,
                op::JUMP_GREATER_EQUAL => accumulator >= operand,
                other => panic!("operation {other:#x}"),
            };
            at += usize::from(if taken { jump_true } else { jump_false });
        }
    }

    fn interesting() -> impl Strategy<Value = u64> {
        prop_oneof![
            any::<u64>(),
            0_u64..64,
            Just(u64::from(NEW_NAMESPACES)),
            Just(u64::from(MSG_FASTOPEN)),
            Just(libc::TIOCSTI),
            // The kernel reads an int: high bits must not hide a command.
            Just(libc::TIOCSTI | 1 << 40),
            Just(libc::TIOCLINUX),
            Just(0o4755_u64),
            Just(u64::from(CREATES)),
            Just(262_u64),
            Just(256_u64),
            Just(132_u64),
            Just(u64::from(u32::MAX)),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]
        #[test]
        fn the_tree_means_the_table(
            debug: bool,
            number in prop_oneof![0_u32..NEWEST + 10, any::<u32>()],
            arguments in proptest::array::uniform6(interesting()),
        ) {
            let filter = Filter::of_commands(debug);
            prop_assert_eq!(
                run(filter.program(), ARCHITECTURE, number, arguments),
                expected(debug, ARCHITECTURE, number, arguments)
            );
        }
    }

    #[test]
    fn every_refused_call_is_refused_and_its_neighbours_are_not() {
        let filter = Filter::of_commands(false);
        for number in 0..=NEWEST + 1 {
            for arguments in [[0; 6], [u64::MAX; 6]] {
                assert_eq!(
                    run(filter.program(), ARCHITECTURE, number, arguments),
                    expected(false, ARCHITECTURE, number, arguments),
                    "system call {number}"
                );
            }
        }
    }

    #[test]
    fn the_toolbox_may_open_by_openat2_and_nothing_else_more() {
        let toolbox = Filter::of_toolbox();
        for number in 0..=NEWEST {
            let freed = [SYS_FCHMODAT2, libc::SYS_openat2].contains(&i64::from(number));
            let expected =
                if freed { ALLOW } else { expected(false, ARCHITECTURE, number, [0; 6]) };
            assert_eq!(run(toolbox.program(), ARCHITECTURE, number, [0; 6]), expected, "{number}");
        }
    }

    #[test]
    fn a_read_only_call_changes_no_metadata_and_reads_as_before() {
        let filter = Filter::of_read_only_calls();
        let answer = |number, arguments| run(filter.program(), ARCHITECTURE, number, arguments);
        let refused = libc::SECCOMP_RET_ERRNO | EPERM as u32;
        for rule in READ_ONLY_RULES.iter().filter(|rule| rule.when == When::Always) {
            assert_eq!(answer(rule.number as u32, [0; 6]), refused, "{rule:?}");
        }
        let ioctl = libc::SYS_ioctl as u32;
        assert_eq!(answer(ioctl, [0, FS_IOC_SETFLAGS.into(), 0, 0, 0, 0]), refused);
        assert_eq!(answer(ioctl, [0, libc::TCGETS, 0, 0, 0, 0]), ALLOW);
        for number in [libc::SYS_read, libc::SYS_openat, libc::SYS_getxattr, libc::SYS_execve] {
            assert_eq!(answer(number as u32, [0; 6]), ALLOW);
        }
    }

    #[test]
    fn another_architecture_is_killed() {
        assert_eq!(run(Filter::of_commands(false).program(), 0x4000_0003, 1, [0; 6]), KILL);
    }

    #[test]
    fn no_number_stands_twice() {
        let mut numbers: Vec<_> = RULES.iter().map(|rule| rule.number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), RULES.len());
    }
}
