//! The Landlock layers of a cell.
//!
//! 1. *Base*, on init and on the toolbox: the file system rights of every mount, and the scopes
//!    that keep signals and abstract sockets in. No network right: servers of the workspace need
//!    free ports, and the network namespace is empty.
//! 2. *Session*, on the keeper of a session: signals stay within the session.
//! 3. *Command*, on each call: a new domain, so that it can trace and read neither init, shims nor
//!    other calls.
//!
//! Layers 2 and 3 also handle REFER, granted everywhere: a layer that handles no file system right
//! forbids every rename across directories (EXDEV), because REFER is implicitly denied.

use std::os::fd::OwnedFd;

use cofferdam_spec::{Access, Mount};
use landlock::{
    ABI, Access as _, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetError, Scope,
};
use rustix::fs::{Mode, OFlags};

/// The least ABI: without REFER no rename across directories would work.
const ABI_MIN: u32 = 2;
/// The ABI that brought the scopes.
const ABI_SCOPES: u32 = 6;

/// What newer ABIs handle, by the first ABI that does.
const LATER: [(u32, &str); 7] = [
    (3, "fs:truncate"),
    (5, "fs:ioctl_dev"),
    (6, "scope:signal"),
    (6, "scope:abstract_unix_socket"),
    (9, "fs:resolve_unix"),
    (10, "net:bind_udp"),
    (10, "net:connect_udp"),
];

/// Rights and scopes that the base layer would handle on a newer kernel. UDP is named although the
/// base layer handles no network right: the level's promise does not rest on it.
pub(crate) fn not_handled(abi: u32) -> Vec<String> {
    LATER.iter().filter(|(first, _)| *first > abi).map(|(_, name)| (*name).to_owned()).collect()
}

/// Why a ruleset could not be made, as an errno.
fn errno(error: &RulesetError) -> i32 {
    use std::error::Error as _;
    let mut cause: Option<&(dyn std::error::Error + 'static)> = error.source();
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            return io.raw_os_error().unwrap_or(libc::EINVAL);
        }
        cause = error.source();
    }
    libc::EOPNOTSUPP
}

fn abi_of(version: u32) -> ABI {
    match version {
        0 => ABI::Unsupported,
        1 => ABI::V1,
        2 => ABI::V2,
        3 => ABI::V3,
        4 => ABI::V4,
        5 => ABI::V5,
        _ => ABI::V6,
    }
}

/// Makes the layers of one cell. The rulesets can be enforced by any process of it.
#[derive(Debug)]
pub(crate) struct Layers {
    version: u32,
}

impl Layers {
    /// `version` is the running kernel's ABI.
    pub(crate) fn new(version: u32) -> Result<Self, i32> {
        if version < ABI_MIN { Err(libc::EOPNOTSUPP) } else { Ok(Self { version }) }
    }

    fn all(&self) -> BitFlags<AccessFs> {
        AccessFs::from_all(abi_of(self.version))
    }

    /// The base layer.
    pub(crate) fn base(&self, mounts: &[Mount]) -> Result<OwnedFd, i32> {
        let read = AccessFs::Execute | AccessFs::ReadFile | AccessFs::ReadDir;
        let all = self.all();
        let devices = (read | AccessFs::WriteFile | AccessFs::IoctlDev) & all;
        let mut rules = vec![
            ("/", read),
            ("/workspace", all),
            ("/home/agent", all),
            ("/tmp", all),
            ("/dev", devices),
            ("/dev/shm", all),
            // Nothing to write there: the values of other processes of the same user could be.
            ("/proc", read),
        ];
        let writable = mounts.iter().filter(|mount| mount.access == Access::ReadWrite);
        rules.extend(writable.map(|mount| (mount.cell.as_str(), all)));
        let scopes = Scope::Signal | Scope::AbstractUnixSocket;
        self.ruleset(all, scopes, &rules)
    }

    /// The layer of a session.
    pub(crate) fn session(&self) -> Result<OwnedFd, i32> {
        let refer: BitFlags<AccessFs> = AccessFs::Refer.into();
        self.ruleset(refer, Scope::Signal.into(), &[("/", refer)])
    }

    /// The layer of a call.
    pub(crate) fn command(&self) -> Result<OwnedFd, i32> {
        let refer: BitFlags<AccessFs> = AccessFs::Refer.into();
        self.ruleset(refer, BitFlags::EMPTY, &[("/", refer)])
    }

    /// The layer of a call that may change nothing under `/workspace`.
    pub(crate) fn read_only_command(&self) -> Result<OwnedFd, i32> {
        let write = AccessFs::from_write(abi_of(self.version)) & !AccessFs::IoctlDev;
        let refer: BitFlags<AccessFs> = AccessFs::Refer.into();
        let rules = [
            ("/", refer),
            ("/home/agent", write),
            ("/tmp", write),
            ("/dev", write),
            ("/proc", write),
        ];
        self.ruleset(write | refer, BitFlags::EMPTY, &rules)
    }

    fn ruleset(
        &self,
        handled: BitFlags<AccessFs>,
        scopes: BitFlags<Scope>,
        rules: &[(&str, BitFlags<AccessFs>)],
    ) -> Result<OwnedFd, i32> {
        let mut opened = Vec::with_capacity(rules.len());
        for (path, access) in rules {
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            let file = rustix::fs::open(*path, flags, Mode::empty());
            opened.push((file.map_err(|error| error.raw_os_error())?, *access));
        }
        let make = || -> Result<Option<OwnedFd>, RulesetError> {
            let mut ruleset = Ruleset::default()
                .set_compatibility(CompatLevel::HardRequirement)
                .handle_access(handled)?;
            if self.version >= ABI_SCOPES && !scopes.is_empty() {
                ruleset = ruleset.scope(scopes)?;
            }
            let mut created = ruleset.create()?;
            for (file, access) in opened {
                created = created.add_rule(PathBeneath::new(file, access))?;
            }
            Ok(created.into())
        };
        // A hard requirement ends in a ruleset or in an error, never in nothing.
        make().map_err(|error| errno(&error))?.ok_or(libc::EOPNOTSUPP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_names_what_a_newer_kernel_would_handle() {
        assert_eq!(not_handled(7), ["fs:resolve_unix", "net:bind_udp", "net:connect_udp"]);
        assert_eq!(not_handled(10), Vec::<String>::new());
        assert_eq!(not_handled(5).len(), 5);
    }

    #[test]
    fn a_kernel_without_refer_is_refused() {
        assert_eq!(Layers::new(1).unwrap_err(), libc::EOPNOTSUPP);
        assert_eq!(Layers::new(0).unwrap_err(), libc::EOPNOTSUPP);
    }
}
