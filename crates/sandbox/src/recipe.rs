//! The recipe: from a fresh process to a locked cell, one step after another.
//!
//! The first process becomes the *toolbox*; init is forked into a pid namespace below it. The
//! order was tried step by step; what each step must follow is said beside it. Every step is
//! named, so that a failure names it and a test can make any of them fail. When a step fails,
//! init is ended and reaped, and what the kernel holds for the cell goes with the last process.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use cofferdam_spec::Access;
use cofferdam_sys::{self as sys, Kinship, MountAttributes};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};
use rustix::fs::{CWD, Mode, OFlags, open, openat};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{DumpableBehavior, Pid, Signal};

use crate::handshake::{receive_descriptors, receive_result, send_descriptors, send_result};
use crate::rootfs::{self, ROOT, at};
use crate::rulesets::{Layers, not_handled};
use crate::seccomp::Filter;
use crate::{Plan, SetupError, Step};

/// Processes that init and shims may fork beyond a policy's limit, so that a call which exhausts
/// the limit cannot keep the next one, or a kill, from starting.
const PROCESSES_RESERVE: u64 = 64;

/// What init has once it is locked in.
#[derive(Debug)]
pub struct InitSide {
    /// Init's end of the channel to the daemon.
    pub control: OwnedFd,
    /// Ends with the toolbox. The parent-death signal does not reach init: it counts as sent by
    /// the toolbox, whose Landlock domain is another.
    pub toolbox: OwnedFd,
    /// The Landlock layer of a session.
    pub session_ruleset: OwnedFd,
    /// The Landlock layer of a call.
    pub command_ruleset: OwnedFd,
    /// The same for a call that may change nothing under `/workspace`.
    pub read_only_ruleset: OwnedFd,
}

/// What the toolbox has once the cell stands.
#[derive(Debug)]
pub struct ToolboxSide {
    /// Init, as the toolbox sees it.
    pub init: Pid,
    /// The daemon's end of the channel to init.
    pub control: OwnedFd,
    /// What init watches: to be kept open for as long as the toolbox lives.
    pub life: OwnedFd,
    /// Landlock ABI of the kernel.
    pub landlock_abi: u32,
    /// Rights that a newer kernel would handle.
    pub rights_not_handled: Vec<String>,
    /// SHA-256 of the commands' filter.
    pub seccomp_digest: [u8; 32],
}

type Done<T = ()> = Result<T, SetupError>;

/// Runs steps by name.
struct Recipe<'a> {
    plan: &'a Plan,
}

impl Recipe<'_> {
    fn step<T, E: Into<io::Error>>(
        &self,
        step: Step,
        action: impl FnOnce() -> Result<T, E>,
    ) -> Done<T> {
        self.step_on(step, || action().map_err(|error| (error.into(), None)))
    }

    /// A step that works on several objects and can name the one that failed.
    fn step_on<T>(
        &self,
        step: Step,
        action: impl FnOnce() -> Result<T, (io::Error, Option<String>)>,
    ) -> Done<T> {
        if self.plan.fail_at == Some(step) {
            return Err(SetupError { step, errno: libc::EIO, object: None });
        }
        action().map_err(|(error, object)| {
            let errno = error.raw_os_error().unwrap_or(libc::EINVAL);
            SetupError { step, errno, object }
        })
    }
}

/// A directory of the host that the cell shows, with where it goes.
struct Source {
    host: String,
    /// Below [`ROOT`].
    cell: String,
    access: Access,
    /// Opened before the namespaces exist.
    before: OwnedFd,
}

/// Becomes the toolbox of a cell whose init runs `init`. The caller has one thread, descriptors
/// 0, 1, 2 and nothing that it minds losing; after an error it should exit.
pub fn enter(plan: &Plan, init: impl FnOnce(InitSide) -> u8) -> Done<ToolboxSide> {
    let recipe = Recipe { plan };
    sys::reset_signals();
    rustix::process::umask(Mode::from_raw_mode(0o022));
    let host_proc = recipe.step(Step::HostProc, || {
        open("/proc", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
    })?;
    let sources = open_sources(&recipe)?;
    let trees = if nix::unistd::geteuid().is_root() {
        let trees = detach_as_root(&recipe, &sources)?;
        drop_ids(&recipe)?;
        Some(trees)
    } else {
        None
    };
    // After the change of ids, which clears it; the thread that started us lives as long as the
    // daemon.
    recipe.step(Step::ParentDeath, die_with_parent)?;

    recipe.step(Step::Unshare, || {
        unshare(
            CloneFlags::CLONE_NEWUSER
                | CloneFlags::CLONE_NEWNS
                | CloneFlags::CLONE_NEWNET
                | CloneFlags::CLONE_NEWIPC
                | CloneFlags::CLONE_NEWUTS,
        )
    })?;
    recipe.step(Step::IdMaps, || write_id_maps(host_proc.as_fd(), plan))?;
    recipe.step(Step::PrivateMounts, || {
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
    })?;
    recipe.step(Step::Loopback, sys::bring_loopback_up)?;
    recipe.step(Step::Hostname, || nix::unistd::sethostname("cell"))?;
    // Before the root file system hides the directory that it is mounted on.
    let trees = match trees {
        Some(trees) => trees,
        None => clone_sources(&recipe, &sources)?,
    };
    build_root(&recipe, &sources, trees)?;

    let ((handshake, init_handshake), (control, init_control)) =
        recipe.step(Step::InitChannels, || {
            let pair = |flags| socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
            let handshake = pair(SocketFlags::CLOEXEC)?;
            pair(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).map(|control| (handshake, control))
        })?;
    let keep = [init_handshake.as_fd(), init_control.as_fd()];
    let child = recipe.step(Step::ForkInit, || {
        sys::fork(Kinship::NamespaceInit, &keep, |kept| run_init(plan, kept, init))
    })?;
    drop((init_handshake, init_control));
    match lock(&recipe, host_proc.as_fd(), handshake.as_fd()) {
        Ok((landlock_abi, filter)) => Ok(ToolboxSide {
            init: child,
            control,
            life: handshake,
            landlock_abi,
            rights_not_handled: not_handled(landlock_abi),
            seccomp_digest: filter.digest(),
        }),
        Err(error) => {
            // Init ends at the end of its channels: past the Landlock layer it is out of reach of
            // a signal from here.
            drop((handshake, control));
            let _ended = rustix::process::kill_process(child, Signal::KILL);
            let _reaped =
                rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty());
            Err(error)
        }
    }
}

/// The toolbox's part after init has been forked.
fn lock(
    recipe: &Recipe<'_>,
    host_proc: BorrowedFd<'_>,
    handshake: BorrowedFd<'_>,
) -> Done<(u32, Filter)> {
    let plan = recipe.plan;
    // Init has mounted its /proc, which only a process of the new pid namespace can.
    receive_result(handshake)?;
    recipe.step(Step::PivotRoot, || {
        std::env::set_current_dir(ROOT)?;
        rustix::process::pivot_root(".", ".")?;
        // The old root lies over the new one now.
        umount2(".", MntFlags::MNT_DETACH)?;
        std::env::set_current_dir("/")
    })?;
    recipe.step(Step::ReadOnlyRoot, || rootfs::make_read_only("/"))?;
    recipe
        .step(Step::NamespaceLimit, || write_at(host_proc, "sys/user/max_user_namespaces", "1"))?;
    recipe
        .step(Step::LockMounts, || unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS))?;
    recipe.step(Step::LockIdMaps, || write_id_maps(host_proc, plan))?;
    recipe.step(Step::HandOver, || {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let user = openat(host_proc, "self/ns/user", flags, Mode::empty())?;
        let mounts = openat(host_proc, "self/ns/mnt", flags, Mode::empty())?;
        send_descriptors(handshake, &[user.as_fd(), mounts.as_fd()])
    })?;
    let layers = Layers::new(sys::landlock_abi().unwrap_or(0));
    recipe.step(Step::ToolboxCapabilities, drop_privileges)?;
    // Only now: until here init must be able to signal us an error, and we to end it.
    receive_result(handshake)?;
    let base = recipe.step(Step::ToolboxLandlock, || {
        let ruleset = layers.and_then(|layers| layers.base(&plan.policy.mounts));
        let ruleset = ruleset.map_err(io::Error::from_raw_os_error)?;
        sys::restrict_with_ruleset(ruleset.as_fd()).map(|()| ruleset)
    })?;
    drop(base);
    recipe.step(Step::ToolboxSeccomp, || sys::install_filter(Filter::of_toolbox().program()))?;
    // Entering the second user namespace may have cleared the parent-death signal.
    recipe.step(Step::ToolboxSeal, || seal().and_then(|()| die_with_parent()))?;
    let abi = sys::landlock_abi().unwrap_or(0);
    Ok((abi, Filter::of_commands(plan.policy.debug)))
}

/// Init's part. Never returns to the toolbox's code.
fn run_init(plan: &Plan, kept: Vec<OwnedFd>, init: impl FnOnce(InitSide) -> u8) -> u8 {
    let Ok([handshake, control]) = <[OwnedFd; 2]>::try_from(kept) else { return 70 };
    let recipe = Recipe { plan };
    match restrict_init(&recipe, handshake.as_fd()) {
        Ok([session_ruleset, command_ruleset, read_only_ruleset]) => {
            if send_result(handshake.as_fd(), &Ok(())).is_err() {
                return 71;
            }
            let toolbox = handshake;
            init(InitSide { control, toolbox, session_ruleset, command_ruleset, read_only_ruleset })
        }
        Err(error) => {
            let _toolbox_gone = send_result(handshake.as_fd(), &Err(error));
            1
        }
    }
}

/// Returns the rulesets of sessions, of calls, and of calls that may not change the workspace.
fn restrict_init(recipe: &Recipe<'_>, handshake: BorrowedFd<'_>) -> Done<[OwnedFd; 3]> {
    let plan = recipe.plan;
    recipe.step(Step::InitProc, || {
        // Until the Landlock layer, which the signal does not pass.
        die_with_parent()?;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        mount(Some("proc"), at("proc").as_str(), Some("proc"), flags, None::<&str>)?;
        io::Result::Ok(())
    })?;
    let joined = send_result(handshake, &Ok(())).and_then(|()| receive_descriptors(handshake));
    recipe.step(Step::InitJoin, || {
        let [user, mounts] = joined?;
        setns(user, CloneFlags::CLONE_NEWUSER)?;
        setns(mounts, CloneFlags::CLONE_NEWNS)?;
        std::env::set_current_dir("/")
    })?;
    recipe.step(Step::InitCapabilities, drop_privileges)?;
    let rulesets = recipe.step(Step::InitRulesets, || {
        let make = || {
            let layers = Layers::new(sys::landlock_abi().unwrap_or(0))?;
            Ok((
                layers.base(&plan.policy.mounts)?,
                layers.session()?,
                layers.command()?,
                layers.read_only_command()?,
            ))
        };
        make().map_err(io::Error::from_raw_os_error)
    })?;
    let (base, session_ruleset, command_ruleset, read_only_ruleset) = rulesets;
    recipe.step(Step::InitLandlock, || sys::restrict_with_ruleset(base.as_fd()))?;
    recipe.step(Step::InitLimits, || set_init_limits(plan))?;
    recipe.step(Step::InitSeccomp, || {
        sys::install_filter(Filter::of_commands(plan.policy.debug).program())
    })?;
    recipe.step(Step::InitSeal, seal)?;
    Ok([session_ruleset, command_ruleset, read_only_ruleset])
}

fn open_sources(recipe: &Recipe<'_>) -> Done<Vec<Source>> {
    let plan = recipe.plan;
    let source = |host: &Path, cell: &str, access| {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let before = open(host, flags, Mode::empty())
            .map_err(|error| (error.into(), Some(host.display().to_string())))?;
        let host = host.to_string_lossy().into_owned();
        Ok(Source { host, cell: at(cell), access, before })
    };
    let workspace = recipe.step_on(Step::Workspace, || {
        let workspace = source(&plan.workspace, "workspace", Access::ReadWrite)?;
        rustix::process::fchdir(&workspace.before).map_err(|error| (error.into(), None))?;
        Ok(workspace)
    })?;
    let home =
        recipe.step_on(Step::Home, || source(&plan.home, "home/agent", Access::ReadWrite))?;
    let mut sources = vec![workspace, home];
    recipe.step_on(Step::PolicySources, || {
        for mount in &plan.policy.mounts {
            sources.push(source(Path::new(&mount.host), &mount.cell[1..], mount.access)?);
        }
        Ok(())
    })?;
    Ok(sources)
}

fn clone_tree(directory: BorrowedFd<'_>, path: &str) -> io::Result<OwnedFd> {
    // Recursive: a bind that leaves a submount out would uncover what lies under it (EINVAL).
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH
        | OpenTreeFlags::AT_RECURSIVE;
    Ok(open_tree(directory, path, flags)?)
}

/// Root: copies made while everything can be reached, with attributes that stay.
fn detach_as_root(recipe: &Recipe<'_>, sources: &[Source]) -> Done<Vec<OwnedFd>> {
    let plan = recipe.plan;
    let id_map = recipe.step(Step::IdMapNamespace, || {
        if plan.ids.map_root_files { id_map_namespace(plan).map(Some) } else { Ok(None) }
    })?;
    let trees: Vec<OwnedFd> = recipe.step_on(Step::Detach, || {
        sources
            .iter()
            .map(|source| {
                let tree = clone_tree(source.before.as_fd(), "")
                    .and_then(|tree| rootfs::protect(tree.as_fd(), source.access).map(|()| tree));
                tree.map_err(|error| (error, Some(source.host.clone())))
            })
            .collect()
    })?;
    recipe.step_on(Step::IdMap, || {
        let Some(id_map) = &id_map else { return Ok(()) };
        let workspace = trees[0].as_fd();
        let none = MountAttributes::default();
        sys::set_mount_attributes(workspace, c"", true, none, Some(id_map.as_fd()))
            .map_err(|error| (error, Some(file_system_of(&sources[0]))))
    })?;
    Ok(trees)
}

fn file_system_of(source: &Source) -> String {
    let magic = rustix::fs::fstatfs(&source.before).map(|stat| stat.f_type);
    let name = match magic {
        Ok(0x794c_7630) => "overlayfs",
        Ok(0x6969) => "nfs",
        Ok(0x6573_5546) => "fuse",
        Ok(0x0102_1997) => "9p",
        Ok(0xef53) => "ext4",
        Ok(0x0102_1994) => "tmpfs",
        _ => "its file system",
    };
    format!("{} on {name}", source.host)
}

/// A user namespace that maps 0 to the cell's user, held by its descriptor alone.
fn id_map_namespace(plan: &Plan) -> io::Result<OwnedFd> {
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let child = sys::fork(Kinship::Child, &[theirs.as_fd()], |kept| {
        let errno = unshare(CloneFlags::CLONE_NEWUSER).map_or_else(|errno| errno as i32, |()| 0);
        let _told = rustix::io::write(&kept[0], &errno.to_ne_bytes());
        // Until the parent has what it wants, or is gone.
        let _end = rustix::io::read(&kept[0], &mut [0_u8; 1]);
        0
    })?;
    drop(theirs);
    let make = || {
        let mut errno = [0; 4];
        if rustix::io::read(&ours, &mut errno)? != errno.len() {
            return Err(io::Error::from_raw_os_error(libc::ECHILD));
        }
        match i32::from_ne_bytes(errno) {
            0 => {}
            errno => return Err(io::Error::from_raw_os_error(errno)),
        }
        let proc = format!("/proc/{}", child.as_raw_nonzero());
        fs::write(format!("{proc}/uid_map"), format!("0 {} 1\n", plan.ids.uid))?;
        fs::write(format!("{proc}/gid_map"), format!("0 {} 1\n", plan.ids.gid))?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        Ok(open(format!("{proc}/ns/user"), flags, Mode::empty())?)
    };
    let made = make();
    drop(ours);
    rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty())?;
    made
}

fn drop_ids(recipe: &Recipe<'_>) -> Done {
    recipe.step(Step::DropIds, || {
        let ids = recipe.plan.ids;
        let (uid, gid) = (Uid::from_raw(ids.uid), Gid::from_raw(ids.gid));
        setgroups(&[])?;
        setresgid(gid, gid, gid)?;
        setresuid(uid, uid, uid)?;
        // The change of ids made us undumpable, and our own files of /proc root's.
        rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)?;
        io::Result::Ok(())
    })
}

fn die_with_parent() -> io::Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?)
}

fn write_at(directory: BorrowedFd<'_>, path: &str, text: &str) -> io::Result<()> {
    let file = openat(directory, path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    match rustix::io::write(&file, text.as_bytes())? {
        written if written == text.len() => Ok(()),
        _ => Err(io::Error::from_raw_os_error(libc::EIO)),
    }
}

/// Maps the cell's ids to themselves in the user namespace just entered. Must come before the
/// process is made undumpable, which gives its files of `/proc` to root.
fn write_id_maps(proc: BorrowedFd<'_>, plan: &Plan) -> io::Result<()> {
    let ids = plan.ids;
    write_at(proc, "self/setgroups", "deny")?;
    write_at(proc, "self/uid_map", &format!("{0} {0} 1\n", ids.uid))?;
    write_at(proc, "self/gid_map", &format!("{0} {0} 1\n", ids.gid))
}

/// Ordinary user: copies made inside the new mount namespace (a descriptor of the old one gives
/// EINVAL). The workspace is where we stand; the others are opened again and must be the same.
fn clone_sources(recipe: &Recipe<'_>, sources: &[Source]) -> Done<Vec<OwnedFd>> {
    recipe.step_on(Step::CloneSources, || {
        let clone = |(index, source): (usize, &Source)| -> io::Result<OwnedFd> {
            let tree = if index == 0 {
                clone_tree(CWD, ".")?
            } else {
                let flags = OFlags::PATH | OFlags::CLOEXEC;
                let again = open(source.host.as_str(), flags, Mode::empty())?;
                let (before, after) =
                    (rustix::fs::fstat(&source.before)?, rustix::fs::fstat(&again)?);
                if (before.st_dev, before.st_ino) != (after.st_dev, after.st_ino) {
                    return Err(io::Error::from_raw_os_error(libc::ESTALE));
                }
                clone_tree(again.as_fd(), "")?
            };
            rootfs::protect(tree.as_fd(), source.access)?;
            Ok(tree)
        };
        let with_name = |(index, source): (usize, &Source)| {
            clone((index, source)).map_err(|error| (error, Some(source.host.clone())))
        };
        sources.iter().enumerate().map(with_name).collect()
    })
}

fn build_root(recipe: &Recipe<'_>, sources: &[Source], trees: Vec<OwnedFd>) -> Done {
    let plan = recipe.plan;
    recipe.step(Step::RootFs, rootfs::mount_root)?;
    recipe.step(Step::Directories, rootfs::make_directories)?;
    recipe.step_on(Step::System, || rootfs::show_directories(&plan.image))?;
    recipe.step_on(Step::Etc, || rootfs::fill_etc(plan))?;
    recipe.step_on(Step::Devices, rootfs::fill_dev)?;
    recipe.step(Step::Terminals, rootfs::mount_terminals)?;
    recipe.step(Step::SharedMemory, rootfs::mount_shared_memory)?;
    // The nodes are mounts of their own; nobody adds or removes a name.
    recipe.step(Step::Devices, || rootfs::make_read_only(&at("dev")))?;
    recipe.step(Step::Temporary, || rootfs::mount_tmp(plan.policy.tmp_bytes))?;
    for ((index, source), tree) in sources.iter().enumerate().zip(trees) {
        let step = match index {
            0 => Step::PlaceWorkspace,
            1 => Step::PlaceHome,
            _ => Step::PlacePolicyMounts,
        };
        let place = || {
            rootfs::make_mount_point(&source.cell, source.before.as_fd())?;
            let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
            move_mount(&tree, "", CWD, source.cell.as_str(), flags)?;
            io::Result::Ok(())
        };
        recipe.step_on(step, || place().map_err(|error| (error, Some(source.host.clone()))))?;
    }
    // Reached also when the policy mounts nothing, so that every step can be made to fail.
    recipe.step(Step::PlacePolicyMounts, || io::Result::Ok(()))
}

/// No capability, none to gain, and no new privilege by exec.
fn drop_privileges() -> io::Result<()> {
    sys::drop_bounding_set()?;
    sys::drop_capabilities()?;
    Ok(rustix::thread::set_no_new_privs(true)?)
}

/// Last: not readable or traceable by processes of the same user.
fn seal() -> io::Result<()> {
    Ok(rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

fn set_init_limits(plan: &Plan) -> io::Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let lower = |resource: Resource, value: u64| {
        let value = getrlimit(resource).maximum.map_or(value, |maximum| maximum.min(value));
        setrlimit(resource, Rlimit { current: Some(value), maximum: Some(value) })
    };
    // Init holds a handful of descriptors for each call, more than a shell's soft limit allows.
    let files = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: files, maximum: files })?;
    lower(Resource::Core, 0)?;
    lower(Resource::Nproc, u64::from(plan.policy.limits.processes) + PROCESSES_RESERVE)?;
    Ok(())
}

/// The path of a file below the root as a C string, for calls that want one.
pub(crate) fn c_path(path: &str) -> io::Result<CString> {
    CString::new(path).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}
