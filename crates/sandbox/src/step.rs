//! The steps of the recipe, by name, and what to do when one fails.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! steps {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal,)+) => {
        /// One step of the recipe that makes a cell, in order.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum Step {
            $($(#[doc = $doc])+ $name,)+
        }

        impl Step {
            /// Every step, in order.
            pub const ALL: &[Step] = &[$(Step::$name,)+];

            /// Its name in reports.
            pub fn as_str(self) -> &'static str {
                match self { $(Step::$name => $text,)+ }
            }
        }
    };
}

steps! {
    /// Keep a descriptor of the host's `/proc`, for id maps and namespaces.
    HostProc = "open the host's /proc",
    /// Open the workspace and stand in it.
    Workspace = "open the workspace",
    /// Open the directory that becomes `/home/agent`.
    Home = "open the home directory",
    /// Open the directories that the policy mounts.
    PolicySources = "open the policy's mounts",
    /// Root: a user namespace whose map turns root's files into the cell's.
    IdMapNamespace = "make the namespace of the id map",
    /// Root: detach copies of workspace, home and the policy's mounts, which the cell's user may
    /// not reach by path.
    Detach = "detach the mounts",
    /// Root: map root's files of the workspace to the cell's user.
    IdMap = "map the workspace's ids",
    /// Root: become the cell's user.
    DropIds = "become the cell's user",
    /// End with the daemon.
    ParentDeath = "tie the cell's life to the daemon's",
    /// New user, mount, network, IPC and UTS namespaces.
    Unshare = "make the namespaces",
    /// Map the cell's user to itself.
    IdMaps = "write the id maps",
    /// Keep mount events in.
    PrivateMounts = "make the mounts private",
    /// The cell's own loopback.
    Loopback = "bring the loopback up",
    /// The cell's own name.
    Hostname = "set the host name",
    /// Ordinary user: copies of workspace, home and the policy's mounts.
    CloneSources = "copy the mounts",
    /// The cell's root file system.
    RootFs = "mount the root file system",
    /// Its directories.
    Directories = "make the root's directories",
    /// The image's directories, read-only.
    System = "mount the image's directories",
    /// Generated and shown files of `/etc`.
    Etc = "fill /etc",
    /// `/dev` and its nodes.
    Devices = "fill /dev",
    /// Terminals.
    Terminals = "mount /dev/pts",
    /// Shared memory.
    SharedMemory = "mount /dev/shm",
    /// `/tmp`.
    Temporary = "mount /tmp",
    /// `/home/agent`.
    PlaceHome = "mount the home directory",
    /// `/workspace`.
    PlaceWorkspace = "mount the workspace",
    /// What the policy adds.
    PlacePolicyMounts = "mount the policy's mounts",
    /// Channels between toolbox, init and daemon.
    InitChannels = "make init's channels",
    /// Init, in a pid namespace for itself and the commands.
    ForkInit = "fork init into a pid namespace",
    /// Init: its own `/proc`.
    InitProc = "mount init's /proc",
    /// The new root becomes the root.
    PivotRoot = "pivot into the root",
    /// Nothing of the root itself can be changed.
    ReadOnlyRoot = "make the root read-only",
    /// One more user namespace, then none.
    NamespaceLimit = "limit user namespaces",
    /// A second user and mount namespace, which locks every mount.
    LockMounts = "lock the mounts",
    /// Map the cell's user again.
    LockIdMaps = "write the locked namespace's id maps",
    /// Give both namespaces to init.
    HandOver = "hand the locked namespaces to init",
    /// Init: enter them.
    InitJoin = "enter the locked namespaces in init",
    /// Init: no capability, no new privilege.
    InitCapabilities = "drop init's capabilities",
    /// Init: the rulesets of sessions and commands.
    InitRulesets = "prepare the Landlock rulesets",
    /// Init: the base Landlock layer.
    InitLandlock = "restrict init by Landlock",
    /// Init: resource limits.
    InitLimits = "set init's limits",
    /// Init: the filter, inherited by all that follows.
    InitSeccomp = "install init's seccomp filter",
    /// Init: not dumpable.
    InitSeal = "seal init",
    /// Toolbox: no capability, no new privilege.
    ToolboxCapabilities = "drop the toolbox's capabilities",
    /// Toolbox: the base Landlock layer.
    ToolboxLandlock = "restrict the toolbox by Landlock",
    /// Toolbox: the filter.
    ToolboxSeccomp = "install the toolbox's seccomp filter",
    /// Toolbox: not dumpable.
    ToolboxSeal = "seal the toolbox",
}

impl fmt::Display for Step {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// A step that failed. Nothing of the cell is left.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetupError {
    /// The step.
    pub step: Step,
    /// Its errno.
    pub errno: i32,
    /// What it was done to, where that says more than the step.
    pub object: Option<String>,
}

impl SetupError {
    /// What would make the step succeed, where that is known.
    pub fn fix(&self) -> Option<&'static str> {
        match (self.step, self.errno) {
            (Step::Unshare | Step::LockMounts | Step::IdMapNamespace, libc::ENOSPC) => {
                Some("raise the sysctl user.max_user_namespaces")
            }
            (Step::Unshare, libc::EPERM | libc::EACCES) => Some(
                "allow user namespaces: sysctl kernel.unprivileged_userns_clone=1 where it exists; \
                 in a container, a seccomp profile that allows unshare",
            ),
            (Step::Unshare, libc::EINVAL | libc::ENOSYS) => {
                Some("a kernel with CONFIG_USER_NS, PID_NS, NET_NS, IPC_NS and UTS_NS")
            }
            (Step::IdMaps | Step::Loopback | Step::PrivateMounts, libc::EPERM | libc::EACCES) => {
                Some(
                    "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor \
                     profile that gives this program the permission userns",
                )
            }
            (Step::InitProc, libc::EPERM) => Some(
                "a /proc without masked paths; in a container: --security-opt \
                 systempaths=unconfined",
            ),
            (Step::IdMap, libc::EINVAL | libc::EPERM | libc::EOPNOTSUPP) => Some(
                "this file system cannot map ids: give the workspace to an ordinary user (chown), \
                 or start as its owner",
            ),
            (
                Step::InitRulesets | Step::InitLandlock | Step::ToolboxLandlock,
                libc::EOPNOTSUPP | libc::ENOSYS,
            ) => Some(
                "Linux 5.19 or newer with CONFIG_SECURITY_LANDLOCK, and landlock in the boot \
                 parameter lsm=",
            ),
            (Step::InitSeccomp | Step::ToolboxSeccomp, libc::EINVAL | libc::ENOSYS) => {
                Some("a kernel with CONFIG_SECCOMP_FILTER")
            }
            (Step::Workspace | Step::Home | Step::CloneSources, libc::EACCES) => {
                Some("give the daemon's user access to the directory and all above it")
            }
            _ => None,
        }
    }
}

impl fmt::Display for SetupError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let errno = std::io::Error::from_raw_os_error(self.errno);
        write!(formatter, "{}", self.step)?;
        if let Some(object) = &self.object {
            write!(formatter, " ({object})")?;
        }
        write!(formatter, ": {errno}")?;
        match self.fix() {
            Some(fix) => write!(formatter, "\nhint: {fix}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for SetupError {}
