//! The cell's root file system: what is where, and with which mount flags.
//!
//! Everything is built below [`ROOT`] and becomes `/` by the pivot. What is not put here does not
//! exist in the cell.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, symlink};
use std::path::Path;

use cofferdam_spec::{Access, HostImage};
use cofferdam_sys::{MountAttributes, set_mount_attributes};
use nix::mount::{MsFlags, mount};
use rustix::fs::CWD;

use crate::Plan;
use crate::recipe::c_path;

/// Where the root is built: a directory that every host has, hidden only in the cell's own mount
/// namespace.
pub(crate) const ROOT: &str = "/tmp";

/// Size of the root's own tmpfs: directories, links and a few generated files.
const ROOT_OPTIONS: &str = "size=1m,nr_inodes=4096,mode=755";
/// `/dev` holds mount points and links.
const DEV_OPTIONS: &str = "size=64k,nr_inodes=256,mode=755";
/// POSIX shared memory and semaphores.
const SHM_OPTIONS: &str = "size=256m,nr_inodes=16384,mode=1777";
/// No `gid=`: only root could map the group of terminals. The number of terminals is one for the
/// whole host (`kernel.pty.max`), so a cell takes its share.
const TERMINAL_OPTIONS: &str = "newinstance,ptmxmode=0666,mode=620,max=256";
/// Files and directories in `/tmp`.
const TMP_INODES: u64 = 1_000_000;
/// Largest default size of `/tmp`.
const TMP_BYTES_DEFAULT: u64 = 1 << 30;

type Named = Result<(), (io::Error, Option<String>)>;

/// The path below [`ROOT`] that becomes `/relative`.
pub(crate) fn at(relative: &str) -> String {
    format!("{ROOT}/{relative}")
}

fn named<E: Into<io::Error>>(path: &str) -> impl Fn(E) -> (io::Error, Option<String>) {
    let path = path.to_owned();
    move |error| (error.into(), Some(path.clone()))
}

/// Flags of what comes from the host: no set-user-id, no devices.
pub(crate) fn protect(tree: BorrowedFd<'_>, access: Access) -> io::Result<()> {
    let attributes = MountAttributes {
        read_only: access == Access::ReadOnly,
        no_suid: true,
        no_dev: true,
        no_exec: false,
    };
    set_mount_attributes(tree, c"", true, attributes, None)
}

/// Makes the mount at `path` read-only, but not those below it.
pub(crate) fn make_read_only(path: &str) -> io::Result<()> {
    let attributes = MountAttributes { read_only: true, ..MountAttributes::default() };
    set_mount_attributes(CWD, &c_path(path)?, false, attributes, None)
}

pub(crate) fn mount_root() -> io::Result<()> {
    mount_tmpfs(ROOT, MsFlags::MS_NOSUID | MsFlags::MS_NODEV, ROOT_OPTIONS)
}

fn mount_tmpfs(target: &str, flags: MsFlags, options: &str) -> io::Result<()> {
    Ok(mount(Some("tmpfs"), target, Some("tmpfs"), flags, Some(options))?)
}

fn make_directory(path: &str) -> io::Result<()> {
    DirBuilder::new().mode(0o755).recursive(true).create(path)
}

fn make_file(path: &str, text: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(path)?;
    file.write_all(text.as_bytes())
}

pub(crate) fn make_directories() -> io::Result<()> {
    for name in ["etc", "dev", "proc", "tmp", "workspace", "home/agent", "run", "var", "sys"] {
        make_directory(&at(name))?;
    }
    symlink("../tmp", at("var/tmp"))?;
    symlink("../run", at("var/run"))
}

/// A directory, or a file, for a mount to lie on.
pub(crate) fn make_mount_point(path: &str, source: BorrowedFd<'_>) -> io::Result<()> {
    let kind = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(source)?.st_mode);
    if kind.is_dir() {
        return make_directory(path);
    }
    if let Some(parent) = Path::new(path).parent() {
        make_directory(&parent.to_string_lossy())?;
    }
    make_file(path, "")
}

pub(crate) fn show_directories(image: &HostImage) -> Named {
    image.directories.iter().try_for_each(|path| show(path, path.trim_start_matches('/')))
}

/// Shows one file, directory or link of the host, read-only; one that does not exist is left out.
fn show(host: &str, cell: &str) -> Named {
    let target = at(cell);
    let step = || -> io::Result<()> {
        let metadata = match fs::symlink_metadata(host) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other?,
        };
        if let Some(parent) = Path::new(&target).parent() {
            make_directory(&parent.to_string_lossy())?;
        }
        if metadata.is_symlink() {
            return symlink(fs::read_link(host)?, &target);
        }
        if metadata.is_dir() {
            make_directory(&target)?;
        } else {
            make_file(&target, "")?;
        }
        let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
        mount(Some(host), target.as_str(), None::<&str>, flags, None::<&str>)?;
        let attributes =
            MountAttributes { read_only: true, no_suid: true, no_dev: true, no_exec: false };
        set_mount_attributes(CWD, &c_path(&target)?, true, attributes, None)
    };
    step().map_err(named(host))
}

pub(crate) fn fill_etc(plan: &Plan) -> Named {
    for (name, text) in generated(plan) {
        make_file(&at(&format!("etc/{name}")), &text).map_err(named(name))?;
    }
    plan.image.etc.iter().try_for_each(|name| show(&format!("/etc/{name}"), &format!("etc/{name}")))
}

/// Files of `/etc` that are the cell's own.
fn generated(plan: &Plan) -> [(&'static str, String); 6] {
    let (uid, gid) = (plan.ids.uid, plan.ids.gid);
    let passwd = format!(
        "root:x:0:0:root:/root:/usr/sbin/nologin\n\
         agent:x:{uid}:{gid}:agent:/home/agent:/bin/bash\n\
         nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    );
    let group = format!("root:x:0:\ntty:x:5:\nagent:x:{gid}:\nnogroup:x:65534:\n");
    // Everything in the cell is the workspace's: files of a third owner must not make git refuse
    // (`/workspace/*` is understood only by git 2.46 and later).
    let mut gitconfig = "[safe]\n\tdirectory = *\n".to_owned();
    let git = &plan.policy.git;
    if !git.name.is_empty() || !git.email.is_empty() {
        gitconfig.push_str("[user]\n");
        for (key, value) in [("name", &git.name), ("email", &git.email)] {
            if !value.is_empty() {
                let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', " ");
                gitconfig.push_str(&format!("\t{key} = \"{value}\"\n"));
            }
        }
    }
    [
        ("passwd", passwd),
        ("group", group),
        ("hosts", "127.0.0.1\tlocalhost cell\n::1\tlocalhost cell\n".to_owned()),
        ("hostname", "cell\n".to_owned()),
        ("gitconfig", gitconfig),
        // Nobody resolves names here; without the file resolvers ask 127.0.0.1, and are refused
        // at once as well.
        ("host.conf", "multi on\n".to_owned()),
    ]
}

pub(crate) fn fill_dev() -> Named {
    let dev = at("dev");
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    mount_tmpfs(&dev, flags, DEV_OPTIONS).map_err(named("/dev"))?;
    for name in ["null", "zero", "full", "random", "urandom", "tty"] {
        let (host, target) = (format!("/dev/{name}"), format!("{dev}/{name}"));
        make_file(&target, "").map_err(named(&host))?;
        mount(Some(host.as_str()), target.as_str(), None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .map_err(named(&host))?;
    }
    let links = [
        ("pts/ptmx", "ptmx"),
        ("/proc/self/fd", "fd"),
        ("/proc/self/fd/0", "stdin"),
        ("/proc/self/fd/1", "stdout"),
        ("/proc/self/fd/2", "stderr"),
    ];
    for (target, name) in links {
        symlink(target, format!("{dev}/{name}")).map_err(named(name))?;
    }
    for name in ["pts", "shm"] {
        make_directory(&format!("{dev}/{name}")).map_err(named(name))?;
    }
    Ok(())
}

pub(crate) fn mount_terminals() -> io::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    let target = at("dev/pts");
    Ok(mount(Some("devpts"), target.as_str(), Some("devpts"), flags, Some(TERMINAL_OPTIONS))?)
}

pub(crate) fn mount_shared_memory() -> io::Result<()> {
    mount_tmpfs(&at("dev/shm"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV, SHM_OPTIONS)
}

pub(crate) fn mount_tmp(bytes: u64) -> io::Result<()> {
    let bytes = match bytes {
        0 => TMP_BYTES_DEFAULT.min(memory_bytes() / 4),
        bytes => bytes,
    };
    let options = format!("size={bytes},nr_inodes={TMP_INODES},mode=1777");
    mount_tmpfs(&at("tmp"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV, &options)
}

fn memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram as u64 * u64::from(info.mem_unit.max(1))
}
