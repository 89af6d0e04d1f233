//! What this host offers, found out by trying. A cell that stands proves most of it; the rest is
//! asked of the kernel.

use std::fs;
use std::path::{Path, PathBuf};

use cofferdam_spec::{Capability, Enforcement};

use crate::Plan;

/// What a standing cell of `plan` proves, what its kernel lacks, and what the host could add.
pub fn capabilities(plan: &Plan, enforcement: &Enforcement) -> Vec<Capability> {
    let proven = |name: &str, detail: &str| Capability {
        name: name.to_owned(),
        available: true,
        detail: detail.to_owned(),
        fix: String::new(),
    };
    let abi = enforcement.landlock_abi;
    let mut found = vec![
        proven("namespaces", "user, mount, pid, network, ipc and uts: the cell was made with them"),
        proven("seccomp", "the filter was installed in init and in the toolbox"),
        proven("landlock", &format!("ABI {abi}: the base layer was enforced")),
    ];
    if plan.ids.map_root_files {
        found.push(proven("id-mapped mount", "root's files of the workspace are the cell's"));
    }
    found.extend(enforcement.rights_not_handled.iter().map(|right| Capability {
        name: format!("landlock {right}"),
        available: false,
        detail: format!("ABI {abi} does not handle it; the namespaces cover what it would"),
        fix: "a newer kernel".to_owned(),
    }));
    found.push(delegated_cgroup());
    found
}

/// Whether a cgroup can be made below this process's own, and killed as one.
fn delegated_cgroup() -> Capability {
    let name = "delegated cgroup v2".to_owned();
    let not_used = "trees are ended by init, with or without it";
    let tried = own_cgroup().ok_or_else(|| "no cgroup v2 mount".to_owned()).and_then(|own| {
        let child = own.join(format!("cofferdam-probe-{}", std::process::id()));
        fs::create_dir(&child).map_err(|error| format!("make {}: {error}", child.display()))?;
        let can_kill = child.join("cgroup.kill").exists();
        let controllers = fs::read_to_string(child.join("cgroup.controllers")).unwrap_or_default();
        fs::remove_dir(&child).map_err(|error| format!("remove {}: {error}", child.display()))?;
        if can_kill { Ok(controllers) } else { Err("no cgroup.kill".to_owned()) }
    });
    match tried {
        Ok(controllers) => {
            let controllers = match controllers.trim() {
                "" => "none",
                list => list,
            };
            let detail = format!("controllers: {controllers}; {not_used}");
            Capability { name, available: true, detail, fix: String::new() }
        }
        Err(reason) => Capability {
            name,
            available: false,
            detail: format!("{reason}; {not_used}"),
            fix: "start the daemon in a delegated cgroup (systemd: Delegate=yes)".to_owned(),
        },
    }
}

/// Directory of this process's cgroup in the v2 hierarchy.
fn own_cgroup() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let membership = fs::read_to_string("/proc/self/cgroup").ok()?;
    cgroup_directory(&mounts, &membership)
}

fn cgroup_directory(mountinfo: &str, membership: &str) -> Option<PathBuf> {
    let mount_point = mountinfo.lines().find_map(|line| {
        let (mount, filesystem) = line.split_once(" - ")?;
        (filesystem.split(' ').next() == Some("cgroup2")).then(|| mount.split(' ').nth(4))?
    })?;
    let path = membership.lines().find_map(|line| line.strip_prefix("0::"))?;
    Some(Path::new(mount_point).join(path.trim_start_matches('/')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_cgroup_is_found_in_a_hybrid_hierarchy() {
        let mountinfo = "30 29 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                         31 29 0:27 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
        let found = cgroup_directory(mountinfo, "3:cpu:/x\n0::/user/a\n");
        assert_eq!(found, Some(PathBuf::from("/sys/fs/cgroup/unified/user/a")));
        assert_eq!(cgroup_directory("", "0::/\n"), None);
        assert_eq!(cgroup_directory(mountinfo, "3:cpu:/x\n"), None);
    }
}
