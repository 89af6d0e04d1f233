use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use super::*;
use crate::search::testing::Tree;
use crate::serve::Gone;

/// How long a change is waited for; it comes within milliseconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// Passes answers on to a test.
struct Passing {
    answers: Mutex<Sender<Answer>>,
    wanted: AtomicBool,
    /// While it is locked, nothing is taken.
    gate: Mutex<()>,
}

impl Reply for Passing {
    fn send(&self, answer: Answer, _: Option<OwnedFd>) -> Result<(), Gone> {
        let _open = self.gate.lock().unwrap();
        self.answers.lock().unwrap().send(answer).map_err(|_| Gone)
    }

    fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }
}

/// A watch that runs, as a test sees it.
struct Watched<'a> {
    tree: &'a Tree,
    answers: Receiver<Answer>,
    passing: &'a Passing,
}

impl Watched<'_> {
    /// The next answer's changes.
    fn next(&self) -> Vec<Change> {
        match self.answers.recv_timeout(PATIENCE).expect("a change in time") {
            Answer::Changes(changes) => changes,
            other => panic!("{other:?}"),
        }
    }

    /// Changes up to the one about the file `end`, which is made now, as short texts.
    fn until_end(&self, end: &str) -> Vec<String> {
        fs::create_dir(self.tree.root.join(end)).unwrap();
        let last = format!("create {end}/");
        let mut all = Vec::new();
        loop {
            all.extend(self.next().iter().map(|change| self.short(change)));
            if all.last() == Some(&last) {
                all.pop();
                // A file that is written in two steps may be told twice.
                all.dedup();
                return all;
            }
            assert!(!all.contains(&last), "{all:?}");
        }
    }

    fn short(&self, change: &Change) -> String {
        let name = |path: &Vec<u8>| self.tree.below(path);
        let slash = |directory: &bool| if *directory { "/" } else { "" };
        match change {
            Change::Create { path, directory } => {
                format!("create {}{}", name(path), slash(directory))
            }
            Change::Write { path } => format!("write {}", name(path)),
            Change::Remove { path, directory } => {
                format!("remove {}{}", name(path), slash(directory))
            }
            Change::Rename { from, to, directory } => {
                let side = |path: &Option<Vec<u8>>| path.as_ref().map_or("-".to_owned(), name);
                format!("rename {} {}{}", side(from), side(to), slash(directory))
            }
            Change::Chmod { path, directory } => {
                format!("chmod {}{}", name(path), slash(directory))
            }
            Change::Overflow => "overflow".to_owned(),
        }
    }
}

/// Watches a tree while `test` runs. Returns how many directories were watched.
fn watching(tree: &Tree, recursive: bool, test: impl FnOnce(&Watched<'_>)) -> u64 {
    let (sender, answers) = channel();
    let passing = Passing {
        answers: Mutex::new(sender),
        wanted: AtomicBool::new(true),
        gate: Mutex::new(()),
    };
    let path = tree.path("");
    thread::scope(|scope| {
        let thread = scope.spawn(|| watch(&path, recursive, &passing));
        let watched = Watched { tree, answers, passing: &passing };
        let directories = match watched.answers.recv_timeout(PATIENCE).unwrap() {
            Answer::Watching { directories, not_watched, canonical } => {
                assert_eq!((not_watched, canonical.as_str()), (0, path.as_str()));
                directories
            }
            other => panic!("{other:?}"),
        };
        // The watch must end when the test fails, too.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(&watched)));
        passing.wanted.store(false, Ordering::Relaxed);
        let ended = thread.join().unwrap();
        if let Err(panic) = result {
            std::panic::resume_unwind(panic);
        }
        assert_eq!(ended, Ok(Answer::WatchEnded));
        directories
    })
}

#[test]
fn every_kind_of_change_is_told() {
    let tree = Tree::with(&["old", "dir/inner", "dir/sub/deep"]);
    let outside = Tree::with(&["from_outside"]);
    let at = |name: &str| tree.root.join(name);
    let directories = watching(&tree, true, |watched| {
        fs::write(at("new"), "").unwrap();
        assert_eq!(watched.until_end("1"), ["create new"]);
        fs::write(at("old"), "content").unwrap();
        fs::write(at("dir/sub/deep"), "content").unwrap();
        let told = watched.until_end("2");
        assert_eq!(told, ["write old", "write dir/sub/deep"]);
        fs::rename(at("old"), at("dir/moved")).unwrap();
        assert_eq!(watched.until_end("3"), ["rename old dir/moved"]);
        fs::set_permissions(at("new"), fs::Permissions::from_mode(0o600)).unwrap();
        fs::set_permissions(at("dir"), fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(watched.until_end("4"), ["chmod new", "chmod dir/"]);
        fs::remove_file(at("new")).unwrap();
        fs::remove_dir_all(at("dir/sub")).unwrap();
        let told = watched.until_end("5");
        assert_eq!(told, ["remove new", "remove dir/sub/deep", "remove dir/sub/"]);
        symlink("nowhere", at("link")).unwrap();
        fs::rename(outside.root.join("from_outside"), at("came")).unwrap();
        fs::rename(at("dir/inner"), outside.root.join("went")).unwrap();
        let told = watched.until_end("6");
        assert_eq!(told, ["create link", "rename - came", "rename dir/inner -"]);
    });
    assert_eq!(directories, 3);
}

#[test]
fn new_directories_are_watched_with_what_is_in_them() {
    let tree = Tree::new();
    watching(&tree, true, |watched| {
        for round in 0..30 {
            let mut expected = Vec::new();
            for path in ["a", "a/b", "a/b/c"] {
                fs::create_dir(tree.root.join(format!("{round}{path}"))).unwrap();
                expected.push(format!("create {round}{path}/"));
                fs::write(tree.root.join(format!("{round}{path}/f")), "").unwrap();
                expected.push(format!("create {round}{path}/f"));
            }
            let mut told = watched.until_end(&format!("end{round}"));
            // Nothing twice, and nothing missing; what was listed has no order.
            told.sort();
            expected.sort();
            assert_eq!(told, expected);
        }
        fs::write(tree.root.join("0a/b/c/f"), "x").unwrap();
        assert_eq!(watched.until_end("end"), ["write 0a/b/c/f"]);
    });
}

#[test]
fn directories_that_move_keep_their_place() {
    let tree = Tree::with(&["a/b/c/f", "d/g"]);
    let outside = Tree::with(&["x/y/z"]);
    let at = |name: &str| tree.root.join(name);
    watching(&tree, true, |watched| {
        fs::rename(at("a/b"), at("d/moved")).unwrap();
        fs::write(at("d/moved/c/f"), "x").unwrap();
        let told = watched.until_end("1");
        assert_eq!(told, ["rename a/b d/moved/", "write d/moved/c/f"]);
        // Where it was, another one may come.
        fs::create_dir_all(at("a/b/c")).unwrap();
        fs::write(at("a/b/c/f"), "").unwrap();
        let told = watched.until_end("2");
        assert_eq!(told, ["create a/b/", "create a/b/c/", "create a/b/c/f"]);
        // What left the tree is not told of any more; what came in is.
        fs::rename(at("d/moved"), outside.root.join("gone")).unwrap();
        assert_eq!(watched.until_end("3"), ["rename d/moved -/"]);
        fs::write(outside.root.join("gone/c/f"), "y").unwrap();
        assert_eq!(watched.until_end("4"), [""; 0]);
        fs::rename(outside.root.join("x"), at("x")).unwrap();
        let told = watched.until_end("5");
        assert_eq!(told, ["rename - x/", "create x/y/", "create x/y/z"]);
        fs::write(at("x/y/z"), "more").unwrap();
        assert_eq!(watched.until_end("6"), ["write x/y/z"]);
    });
}

#[test]
fn without_recursion_only_the_directory_is_watched() {
    let tree = Tree::with(&["sub/f"]);
    let directories = watching(&tree, false, |watched| {
        fs::write(tree.root.join("sub/f"), "x").unwrap();
        fs::write(tree.root.join("g"), "").unwrap();
        fs::create_dir(tree.root.join("new")).unwrap();
        fs::write(tree.root.join("new/f"), "").unwrap();
        assert_eq!(watched.until_end("1"), ["create g", "create new/"]);
    });
    assert_eq!(directories, 1);
}

#[test]
fn a_watch_ends_with_its_directory() {
    for moves in [false, true] {
        let tree = Tree::with(&["watched/f"]);
        let path = tree.root.join("watched");
        let reply = crate::search::testing::Kept::new();
        let text = path.to_str().unwrap().to_owned();
        let ended = thread::scope(|scope| {
            let thread = scope.spawn(|| watch(&text, true, &reply));
            while reply.answers.lock().unwrap().is_empty() {
                thread::yield_now();
            }
            if moves {
                fs::rename(&path, tree.root.join("elsewhere")).unwrap();
            } else {
                fs::remove_dir_all(&path).unwrap();
            }
            thread.join().unwrap()
        });
        assert_eq!(ended, Ok(Answer::WatchEnded));
        assert!(Answer::WatchEnded.is_last());
        let answers = reply.answers.lock().unwrap();
        let Some(Answer::Changes(last)) = answers.last() else { panic!("{answers:?}") };
        let gone = Change::Remove { path: text.into_bytes(), directory: true };
        assert_eq!(last.last(), Some(&gone));
    }
}

#[test]
fn a_flood_is_told_or_said_to_be_lost() {
    let tree = Tree::with(&["sub/f"]);
    let queued = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
    let queued: usize = queued.trim().parse().unwrap();
    watching(&tree, true, |watched| {
        // While nobody takes answers, the kernel's queue runs over.
        let closed = watched.passing.gate.lock().unwrap();
        for number in 0..=(queued / 2 + 2000) {
            let path = tree.root.join(format!("f{number}"));
            fs::write(&path, "").unwrap();
            fs::remove_file(&path).unwrap();
        }
        fs::create_dir_all(tree.root.join("lost/deep")).unwrap();
        drop(closed);
        let mut lost = false;
        while !lost {
            lost = watched.next().contains(&Change::Overflow);
        }
        // The rescan found what was made while events were lost.
        let told = watched.until_end("1");
        assert!(told.is_empty(), "{told:?}");
        fs::write(tree.root.join("lost/deep/f"), "").unwrap();
        assert_eq!(watched.until_end("2"), ["create lost/deep/f"]);
    });
}

#[test]
fn what_is_no_directory_is_refused() {
    let tree = Tree::with(&["f"]);
    let reply = crate::search::testing::Kept::new();
    let kind = |path: &str| watch(&tree.path(path), true, &reply).unwrap_err().kind;
    assert_eq!(kind("f"), FaultKind::NotDirectory);
    assert_eq!(kind("missing"), FaultKind::NotFound);
}
