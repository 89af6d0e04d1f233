//! Faults in the recipe: each step fails once. Then the error names it, and no process, mount,
//! descriptor, cgroup or file is left.
#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::process::Stdio;
use std::time::Duration;

use cofferdam_e2e::{Who, all_processes, both, run_outside, snapshot, standalone, wait_for};

/// Mounts that this namespace sees.
fn mounts() -> Vec<String> {
    let text = fs::read_to_string("/proc/self/mountinfo").expect("/proc is mounted");
    text.lines().map(str::to_owned).collect()
}

/// Steps that only root's recipe has, or only an ordinary user's.
fn is_not_of_recipe(who: Who, step: &str) -> bool {
    match who {
        Who::Root => ["CloneSources"].contains(&step),
        Who::User => ["IdMapNamespace", "Detach", "IdMap", "DropIds"].contains(&step),
    }
}

both! {
    async fn every_step_can_fail_and_leaves_nothing(who) {
        let directory = tempfile::Builder::new()
            .prefix("cofferdam-test-")
            .permissions(fs::Permissions::from_mode(0o755))
            .tempdir_in("/tmp")
            .expect("a temporary directory");
        let [workspace, home, program] = ["workspace", "home", "cell-standalone"].map(|name| directory.path().join(name));
        fs::create_dir(&workspace).expect("a directory");
        fs::create_dir(&home).expect("a directory");
        fs::set_permissions(&home, fs::Permissions::from_mode(0o700)).expect("a mode");
        fs::write(workspace.join("file"), "text").expect("a file");
        fs::copy(standalone(), &program).expect("a program");
        for path in [directory.path(), &workspace, &home, &workspace.join("file")] {
            chown(path, Some(who.id()), Some(who.id())).expect("root can");
        }
        let run = |arguments: &[&str]| {
            let mut command = who.command(&program);
            command.arg("--workspace").arg(&workspace).arg("--home").arg(&home).args(arguments);
            run_outside(command.stdin(Stdio::null())).stdout
        };
        let steps = run(&["--list-steps"]);
        let steps: Vec<(&str, &str)> =
            steps.lines().map(|line| line.split_once('\t').expect("a name and a text")).collect();
        assert!(steps.len() >= 30, "{steps:?}");
        let marker = workspace.display().to_string();
        // Positive control: without a fault the cell stands; and it settles the owner of `home`.
        assert_eq!(run(&[]), "ok\n");
        let (files, mounts_before) = (snapshot(directory.path()), mounts());
        for (name, text) in steps {
            let said = run(&["--fail-at", name]);
            if is_not_of_recipe(who, name) {
                assert_eq!(said, "ok\n", "{name} is no step of {who:?}'s recipe");
            } else {
                let first = said.lines().next().unwrap_or_default();
                assert_eq!(first, format!("failed\t{name}\t{}", nix::libc::EIO), "{said}");
                assert!(said.contains(text), "the error names {text:?}: {said}");
                // The program looks at itself before it ends: descriptors and children as before.
                assert!(said.ends_with("left\tdescriptors 0\tchildren 0\tmounts 0\n"), "{name}: {said}");
            }
            wait_for(&format!("no process is left after {name}"), Duration::from_secs(2), || {
                let left: Vec<_> = all_processes()
                    .into_iter()
                    .filter(|process| process.command_line.contains(&marker))
                    .collect();
                left.is_empty().then_some(())
            })
            .await;
            assert_eq!(mounts(), mounts_before, "{name}");
            assert_eq!(snapshot(directory.path()), files, "{name}");
        }
    }
}
