//! Writes, whole and cut off at every step, alone and against other writers.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use super::*;
use crate::call::{Answer, Content, FileCall, Guard, Write};
use crate::serve::Files;
use crate::stamp::hash_bytes;
use crate::store::is_temporary_name;

/// A caller who keeps the last answer.
#[derive(Default)]
struct Caller(Mutex<Option<Answer>>);

impl Reply for Caller {
    fn send(&self, answer: Answer, _: Option<OwnedFd>) -> Result<(), Gone> {
        *self.0.lock().unwrap() = Some(answer);
        Ok(())
    }

    fn is_wanted(&self) -> bool {
        true
    }
}

/// Makes a call.
pub(crate) fn ask(
    files: &Files,
    call: FileCall,
    content: Option<OwnedFd>,
) -> Result<Answer, Fault> {
    let caller = Caller::default();
    files.serve(call, content, &caller);
    match caller.0.into_inner().unwrap() {
        Some(Answer::Failed(fault)) => Err(fault),
        Some(answer) => Ok(answer),
        None => panic!("there is no answer"),
    }
}

/// A home and a workspace, with the tools over them.
pub(crate) struct Made {
    _held: tempfile::TempDir,
    pub(crate) root: PathBuf,
    pub(crate) files: Files,
}

impl Made {
    pub(crate) fn new() -> Self {
        let held = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(held.path()).unwrap();
        fs::create_dir(root.join("home")).unwrap();
        fs::create_dir(root.join("work")).unwrap();
        let files = Files::new(root.join("home"));
        Self { _held: held, root, files }
    }

    /// The tools, where `before` is told of every step.
    fn with_steps(before: impl Fn(Step) -> Result<(), Errno> + Send + Sync + 'static) -> Self {
        let mut made = Self::new();
        made.files.steps.before = Some(Box::new(before));
        made
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.root.join("work").join(name).to_str().unwrap().to_owned()
    }

    /// What is kept among the conflicts.
    fn conflicts(&self) -> Vec<Vec<u8>> {
        contents(&self.root.join("home/.cofferdam/conflicts"))
    }

    /// Fails when anything temporary is left.
    pub(crate) fn assert_clean(&self, when: &str) {
        for entry in fs::read_dir(self.root.join("work")).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(!is_temporary_name(&name), "{when}: {name} is left");
        }
        for notes in ["intents", "undo"] {
            let left = contents(&self.root.join("home/.cofferdam").join(notes));
            assert_eq!(left.len(), 0, "{when}: {notes} are left");
        }
    }
}

fn contents(directory: &Path) -> Vec<Vec<u8>> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    entries.map(|entry| fs::read(entry.unwrap().path()).unwrap()).collect()
}

pub(crate) fn guard(expected: Expected) -> Guard {
    Guard { canonical: None, expected }
}

pub(crate) fn exactly(bytes: &[u8]) -> Expected {
    Expected::Exactly { stamp: hash_bytes(bytes), or_absent: false }
}

fn call(path: String, content: &[u8], expected: Expected) -> Write {
    Write {
        path,
        content: Content::Inline(content.to_vec()),
        guard: guard(expected),
        mode: 0o666,
        parents: false,
        keep_bom: false,
    }
}

fn write(files: &Files, call: Write) -> Result<Written, FaultKind> {
    match ask(files, FileCall::Write(call), None) {
        Ok(Answer::Written(written)) => Ok(written),
        Ok(other) => panic!("{other:?}"),
        Err(fault) => Err(fault.kind),
    }
}

/// A descriptor of a file without a name.
fn descriptor(bytes: &[u8]) -> OwnedFd {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file.into()
}

#[test]
fn what_is_expected_is_judged_first() {
    let other = Expected::Exactly { stamp: hash_bytes(b"other"), or_absent: false };
    let other_or_absent = Expected::Exactly { stamp: hash_bytes(b"other"), or_absent: true };
    let old = hash_bytes(b"old\n");
    for (there, expected, result) in [
        (None, Expected::Absent, Ok(())),
        (None, Expected::Any, Ok(())),
        (None, other_or_absent, Ok(())),
        (None, other, Err(FaultKind::Stale(None))),
        (Some("old\n"), Expected::Absent, Err(FaultKind::Exists(Some(old)))),
        (Some("old\n"), Expected::Any, Ok(())),
        (Some("old\n"), exactly(b"old\n"), Ok(())),
        (Some("old\n"), other, Err(FaultKind::Stale(Some(old)))),
        (Some("old\n"), other_or_absent, Err(FaultKind::Stale(Some(old)))),
    ] {
        let made = Made::new();
        let path = made.path("file");
        if let Some(text) = there {
            fs::write(&path, text).unwrap();
        }
        let written = write(&made.files, call(path.clone(), b"new\ntext", expected));
        let whole = result.map(|()| Written {
            canonical: path.clone(),
            existed: there.is_some(),
            previous: there.map(|text| hash_bytes(text.as_bytes())),
            stamp: hash_bytes(b"new\ntext"),
            lines: 2,
            atomic: true,
            link_broken: false,
            kept: None,
            bom_kept: false,
        });
        let text = if whole.is_ok() { Some("new\ntext") } else { there };
        assert_eq!(written, whole, "{there:?} {expected:?}");
        assert_eq!(fs::read_to_string(&path).ok().as_deref(), text, "{there:?} {expected:?}");
        made.assert_clean("judged");
    }
}

#[test]
fn mode_attributes_and_links_stay() {
    let made = Made::new();
    let path = made.path("file");
    fs::write(&path, "old").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o750)).unwrap();
    let file = File::open(&path).unwrap();
    rustix::fs::fsetxattr(&file, "user.color", b"blue", XattrFlags::empty()).unwrap();
    fs::hard_link(&path, made.path("other")).unwrap();
    symlink("file", made.path("link")).unwrap();
    let written = write(&made.files, call(made.path("link"), b"new", Expected::Any)).unwrap();
    assert_eq!(written.canonical, path);
    assert!(written.link_broken);
    assert_eq!(fs::read(&path).unwrap(), b"new");
    assert_eq!(fs::read(made.path("other")).unwrap(), b"old");
    assert_eq!(fs::read_link(made.path("link")).unwrap(), Path::new("file"));
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o750);
    let mut value = [0; 8];
    let size = rustix::fs::getxattr(&path, "user.color", &mut value[..]).unwrap();
    assert_eq!(&value[..size], b"blue");
    // A new file has the mode that is asked for, without what others could write.
    let new = made.path("new");
    write(&made.files, call(new.clone(), b"new", Expected::Any)).unwrap();
    assert_eq!(fs::metadata(&new).unwrap().mode() & 0o7777, 0o644);
    // A link that leads to nothing makes what it names.
    symlink("later", made.path("dangling")).unwrap();
    write(&made.files, call(made.path("dangling"), b"x", Expected::Absent)).unwrap();
    assert_eq!(fs::read(made.path("later")).unwrap(), b"x");
    made.assert_clean("written");
}

#[test]
fn paths_are_refused_before_anything_is_made() {
    let made = Made::new();
    fs::create_dir(made.path("dir")).unwrap();
    fs::write(made.path("file"), "old").unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        made.path("fifo"),
        rustix::fs::FileType::Fifo,
        Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    for (name, kind) in [
        ("dir", FaultKind::IsDirectory),
        ("dir/", FaultKind::IsDirectory),
        ("new/", FaultKind::IsDirectory),
        ("a/b/", FaultKind::NotFound),
        ("a/b/.", FaultKind::NotFound),
        ("a/b/..", FaultKind::NotFound),
        ("file/", FaultKind::NotDirectory),
        ("file/x", FaultKind::NotDirectory),
        ("fifo", FaultKind::NotRegular(crate::call::FileKind::Fifo)),
    ] {
        let call = Write { parents: true, ..call(made.path(name), b"x", Expected::Any) };
        assert_eq!(write(&made.files, call), Err(kind), "{name}");
    }
    let call = call(made.path("a/b/c"), b"x", Expected::Any);
    assert_eq!(write(&made.files, call.clone()), Err(FaultKind::NotFound));
    let elsewhere = Guard { canonical: Some(made.path("a/b/other")), expected: Expected::Any };
    assert_eq!(
        write(&made.files, Write { parents: true, guard: elsewhere, ..call.clone() }),
        Err(FaultKind::Elsewhere { canonical: made.path("a/b/c") })
    );
    assert!(!Path::new(&made.path("a")).exists());
    let here = Guard { canonical: Some(made.path("a/b/c")), expected: Expected::Any };
    write(&made.files, Write { parents: true, guard: here, ..call }).unwrap();
    assert_eq!(fs::read(made.path("a/b/c")).unwrap(), b"x");
}

#[test]
fn a_byte_order_mark_is_kept_once() {
    for (old, new, keep_bom, expected) in [
        ("\u{feff}a", "b", true, "\u{feff}b"),
        ("\u{feff}a", "b", false, "b"),
        ("\u{feff}a", "\u{feff}b", true, "\u{feff}b"),
        ("\u{feff}", "", true, "\u{feff}"),
        ("a", "b", true, "b"),
    ] {
        let made = Made::new();
        let path = made.path("file");
        fs::write(&path, old).unwrap();
        let call = Write { keep_bom, ..call(path.clone(), new.as_bytes(), Expected::Any) };
        let written = write(&made.files, call).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), expected);
        assert_eq!(written.bom_kept, expected != new);
        assert_eq!(written.stamp, hash_bytes(expected.as_bytes()));
        assert_eq!(written.lines, u64::from(!expected.is_empty()));
    }
}

#[test]
fn content_comes_by_descriptor_and_a_cut_one_changes_nothing() {
    let made = Made::new();
    let path = made.path("file");
    fs::write(&path, "old").unwrap();
    let content: Vec<u8> = (0..1_300_000_u32).map(|at| (at % 251) as u8).collect();
    let mut by_descriptor = call(path.clone(), b"", Expected::Any);
    by_descriptor.content = Content::Descriptor { size: content.len() as u64 + 1 };
    let cut = ask(&made.files, FileCall::Write(by_descriptor.clone()), Some(descriptor(&content)));
    assert_eq!(cut.unwrap_err().step, "read the content: it was cut off");
    assert_eq!(fs::read(&path).unwrap(), b"old");
    made.assert_clean("cut");
    by_descriptor.content = Content::Descriptor { size: content.len() as u64 };
    let whole = ask(&made.files, FileCall::Write(by_descriptor), Some(descriptor(&content)));
    let Ok(Answer::Written(written)) = whole else { panic!("{whole:?}") };
    assert_eq!(written.stamp, hash_bytes(&content));
    assert_eq!(written.lines, crate::text::count_lines(&content));
    assert!(fs::read(&path).unwrap() == content);
}

/// How a write is made to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// A file that does not exist.
    New,
    /// An exchange.
    Exchange,
    /// In place, because no file can be made beside it.
    NoTemporary,
    /// In place, because the file system exchanges nothing.
    NoExchange,
    /// An exchange that somebody else's write comes before.
    Overtaken,
}

const WAYS: [Way; 5] = [Way::New, Way::Exchange, Way::NoTemporary, Way::NoExchange, Way::Overtaken];

const OLD: &[u8] = b"old text\n";
const OTHER: &[u8] = b"old text\nand more of somebody else\n";

/// Longer than a part, so that a write in place can be cut in the middle.
fn new_text() -> Vec<u8> {
    b"new text\n".repeat(130_000)
}

impl Way {
    /// What the kernel says to a step.
    fn steer(self, step: Step, path: &str) -> Result<(), Errno> {
        match (self, step) {
            (Way::NoTemporary, Step::MakeTemporary) => Err(Errno::ACCESS),
            (Way::NoExchange, Step::Exchange) => Err(Errno::INVAL),
            (Way::Overtaken, Step::Exchange) => {
                fs::write(path, OTHER).unwrap();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn call(self, path: &str) -> (FileCall, OwnedFd) {
        let content = new_text();
        let expected = if self == Way::New { Expected::Absent } else { exactly(OLD) };
        let mut call = call(path.to_owned(), b"", expected);
        call.content = Content::Descriptor { size: content.len() as u64 };
        (FileCall::Write(call), descriptor(&content))
    }

    /// Makes tools where `stop` is asked at every step, by its number.
    fn made(self, stop: impl Fn(usize, Step) -> Result<(), Errno> + Send + Sync + 'static) -> Made {
        let (count, target) = (AtomicUsize::new(0), Arc::new(Mutex::new(String::new())));
        let told = Arc::clone(&target);
        let made = Made::with_steps(move |step| {
            let path = told.lock().unwrap().clone();
            self.steer(step, &path)?;
            stop(count.fetch_add(1, Ordering::SeqCst), step)
        });
        *target.lock().unwrap() = made.path("file");
        if self != Way::New {
            fs::write(made.path("file"), OLD).unwrap();
        }
        made
    }

    /// The steps that it takes.
    fn steps(self) -> Vec<Step> {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&seen);
        let made = self.made(move |_, step| {
            noted.lock().unwrap().push(step);
            Ok(())
        });
        let (call, content) = self.call(&made.path("file"));
        let answer = ask(&made.files, call, Some(content));
        match (self, answer) {
            (Way::Overtaken, Err(fault)) => {
                assert_eq!(fault.kind, FaultKind::Stale(Some(hash_bytes(OTHER))));
                assert_eq!(fs::read(made.path("file")).unwrap(), OTHER);
            }
            (_, Ok(Answer::Written(written))) => {
                let atomic = matches!(self, Way::New | Way::Exchange);
                assert_eq!((written.atomic, written.kept), (atomic, None), "{self:?}");
                assert!(fs::read(made.path("file")).unwrap() == new_text());
            }
            (_, other) => panic!("{self:?}: {other:?}"),
        }
        assert_eq!(made.conflicts().len(), 0, "{self:?}");
        made.assert_clean("whole");
        seen.lock().unwrap().clone()
    }

    /// Fails unless the file is all old or all new, and what somebody else wrote is there.
    fn assert_whole(self, made: &Made, when: &str) {
        let there = fs::read(made.path("file")).ok();
        let whole = match &there {
            None => self == Way::New,
            Some(there) => there == OLD || there == OTHER || *there == new_text(),
        };
        assert!(whole, "{when}: {:?}", there.map(|there| there.len()));
        made.assert_clean(when);
    }
}

#[test]
fn a_write_that_is_killed_at_any_step_is_done_or_undone() {
    for way in WAYS {
        let steps = way.steps().len();
        for last in 0..steps {
            let (stopped, wait) = mpsc::channel();
            let stopped = Mutex::new(stopped);
            // The thread that is killed never goes on, and never cleans up.
            let made = Arc::new(way.made(move |step, _| {
                if step == last {
                    stopped.lock().unwrap().send(()).unwrap();
                    loop {
                        std::thread::park();
                    }
                }
                Ok(())
            }));
            let killed = Arc::clone(&made);
            std::thread::spawn(move || {
                let (call, content) = way.call(&killed.path("file"));
                let _ = ask(&killed.files, call, Some(content));
            });
            wait.recv().unwrap();
            let overtaken = fs::read(made.path("file")).is_ok_and(|there| there == OTHER);
            let again = Files::new(made.root.join("home"));
            again.recover();
            way.assert_whole(&made, &format!("{way:?} killed at {last} of {steps}"));
            // What somebody else wrote stays, or is kept.
            let other = overtaken
                && !made.conflicts().iter().any(|kept| kept == OTHER)
                && fs::read(made.path("file")).unwrap() != OTHER;
            assert!(!other, "{way:?} killed at {last} of {steps}");
            // The thread holds it for ever; the directory goes here.
            fs::remove_dir_all(&made.root).unwrap();
        }
    }
}

#[test]
fn a_write_that_fails_at_any_step_leaves_nothing_half_done() {
    for way in WAYS {
        for (failing, step) in way.steps().into_iter().enumerate() {
            let made =
                way.made(move |at, _| if at == failing { Err(Errno::NOSPC) } else { Ok(()) });
            let (call, content) = way.call(&made.path("file"));
            let answer = ask(&made.files, call, Some(content));
            let when = format!("{way:?} fails at {failing}, {step:?}: {answer:?}");
            let there = fs::read(made.path("file")).ok();
            let new = there.as_ref() == Some(&new_text());
            let overtaken = there.as_deref() == Some(OTHER);
            let old = there.as_deref() == if way == Way::New { None } else { Some(OLD) };
            match answer {
                Ok(_) => assert!(new, "{when}"),
                Err(Fault { kind: FaultKind::NoSpace, .. }) => match step {
                    // Somebody else wrote just before.
                    Step::Exchange => {
                        assert!(if way == Way::Overtaken { overtaken } else { old }, "{when}");
                    }
                    _ => assert!(old, "{when}"),
                },
                Err(Fault { kind: FaultKind::Conflict { kept }, .. }) => {
                    let kept = fs::read(kept).unwrap();
                    assert!((new && kept == OTHER) || overtaken, "{when}");
                }
                Err(Fault { kind: FaultKind::Stale(_), .. }) => {
                    assert!(if way == Way::Overtaken { overtaken } else { old }, "{when}");
                }
                Err(_) => panic!("{when}"),
            }
            made.assert_clean(&when);
        }
    }
}

/// What another program does to the file.
#[derive(Debug, Clone, Copy)]
enum Meddling {
    /// Opens it, appends and closes it.
    Append,
    /// Appends through a descriptor that it has had open all the time.
    AppendHeld,
    /// Puts another file in its place.
    Replace,
}

#[test]
fn nothing_that_another_program_writes_between_any_two_steps_is_lost() {
    let text = b"and a line of somebody else\n";
    for meddling in [Meddling::Append, Meddling::AppendHeld, Meddling::Replace] {
        for at in 0..Way::Exchange.steps().len() {
            let held = Arc::new(Mutex::new(None::<File>));
            let (shared, path) = (Arc::clone(&held), Arc::new(Mutex::new(String::new())));
            let (told, count) = (Arc::clone(&path), AtomicUsize::new(0));
            let made = Made::with_steps(move |_| {
                if count.fetch_add(1, Ordering::SeqCst) != at {
                    return Ok(());
                }
                let path = told.lock().unwrap().clone();
                match meddling {
                    Meddling::Append => {
                        OpenOptions::new().append(true).open(path).unwrap().write_all(text).unwrap()
                    }
                    Meddling::AppendHeld => {
                        shared.lock().unwrap().as_mut().unwrap().write_all(text).unwrap();
                    }
                    Meddling::Replace => {
                        let other = format!("{path}.other");
                        fs::write(&other, text).unwrap();
                        fs::rename(other, path).unwrap();
                    }
                }
                Ok(())
            });
            *path.lock().unwrap() = made.path("file");
            fs::write(made.path("file"), OLD).unwrap();
            if matches!(meddling, Meddling::AppendHeld) {
                let file = OpenOptions::new().append(true).open(made.path("file"));
                *held.lock().unwrap() = Some(file.unwrap());
            }
            let (call, content) = Way::Exchange.call(&made.path("file"));
            let answer = ask(&made.files, call, Some(content));
            let mut all = made.conflicts();
            all.push(fs::read(made.path("file")).unwrap());
            match &answer {
                Ok(Answer::Written(Written { kept: Some(kept), .. }))
                | Err(Fault { kind: FaultKind::Conflict { kept }, .. }) => {
                    all.push(fs::read(kept).unwrap());
                }
                _ => {}
            }
            let found = all.iter().any(|one| one.windows(text.len()).any(|part| part == text));
            assert!(found, "{meddling:?} at {at}: {answer:?}");
            if let Ok(Answer::Written(written)) = &answer {
                let kept = written.kept.is_some();
                assert_eq!(kept, matches!(meddling, Meddling::AppendHeld), "at {at}");
            }
            made.assert_clean("meddled");
        }
    }
}

#[test]
fn what_a_program_writes_that_opened_the_old_file_too_late_is_kept() {
    let late = b"a late line\n";
    let opened = Arc::new(Mutex::new(None::<OwnedFd>));
    let (held, writer) = (Arc::clone(&opened), Arc::new(Mutex::new(None)));
    let spawned = Arc::clone(&writer);
    let made = Made::with_steps(move |step| {
        if step != Step::SyncDirectory {
            return Ok(());
        }
        // It found the file by its name before, and opens it for writing now.
        let found = held.lock().unwrap().take().unwrap();
        let inode = rustix::fs::fstat(&found).unwrap().st_ino;
        *spawned.lock().unwrap() = Some(std::thread::spawn(move || {
            let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&found));
            OpenOptions::new().append(true).open(path).unwrap().write_all(late).unwrap();
        }));
        let until = Instant::now() + Duration::from_secs(20);
        let waits = |locks: String| {
            locks
                .lines()
                .any(|line| line.contains("BREAKING") && line.contains(&format!(":{inode} ")))
        };
        while !waits(fs::read_to_string("/proc/locks").unwrap()) {
            assert!(Instant::now() < until, "nobody waits for the lease");
            std::thread::yield_now();
        }
        Ok(())
    });
    fs::write(made.path("file"), OLD).unwrap();
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let found = rustix::fs::open(made.path("file"), flags, Mode::empty()).unwrap();
    *opened.lock().unwrap() = Some(found);
    let written = write(&made.files, call(made.path("file"), b"new", exactly(OLD))).unwrap();
    let writer = writer.lock().unwrap().take().unwrap();
    writer.join().unwrap();
    assert_eq!(fs::read(written.kept.unwrap()).unwrap(), [OLD, late].concat());
    assert_eq!(fs::read(made.path("file")).unwrap(), b"new");
    made.assert_clean("late");
}

#[test]
fn what_a_program_goes_on_to_write_has_a_name() {
    let made = Made::new();
    fs::write(made.path("file"), OLD).unwrap();
    let mut writer = OpenOptions::new().append(true).open(made.path("file")).unwrap();
    let written = write(&made.files, call(made.path("file"), b"new", exactly(OLD))).unwrap();
    writer.write_all(b"later\n").unwrap();
    let kept = written.kept.unwrap();
    assert!(kept.starts_with(&made.path("file.cofferdam-kept-")), "{kept}");
    assert_eq!(fs::read(kept).unwrap(), [OLD, b"later\n"].concat());
    assert_eq!(fs::read(made.path("file")).unwrap(), b"new");
    made.assert_clean("kept");
}

#[test]
fn what_stands_in_the_way_of_our_directories_gets_another_name() {
    let made = Made::new();
    let own = made.root.join("home/.cofferdam");
    let write_it = |text: &[u8]| {
        let call = call(made.path("file"), text, Expected::Any);
        write(&made.files, call).unwrap();
        assert_eq!(fs::read(made.path("file")).unwrap(), text);
    };
    write_it(b"1");
    fs::remove_dir_all(&own).unwrap();
    fs::write(&own, "in the way").unwrap();
    write_it(b"2");
    fs::remove_dir_all(own.join("intents")).unwrap();
    std::os::unix::fs::symlink("nowhere", own.join("intents")).unwrap();
    write_it(b"3");
    let above = fs::read_dir(made.root.join("home")).unwrap();
    let names: Vec<_> = above.map(|one| one.unwrap().file_name().into_string().unwrap()).collect();
    assert!(names.iter().any(|name| name.starts_with(".cofferdam-broken-")), "{names:?}");
}

#[test]
fn what_must_be_kept_is_copied_when_the_home_is_on_another_file_system() {
    let made = Made::new();
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let device = |path: &Path| fs::metadata(path).unwrap().dev();
    assert_ne!(device(home.path()), device(&made.root), "both are on one file system");
    let files = Files::new(fs::canonicalize(home.path()).unwrap());
    fs::write(made.path("file"), OLD).unwrap();
    // What a killed toolbox left is copied.
    let other = made.path(".cofferdam-0123456789abcdef.tmp");
    fs::write(&other, OTHER).unwrap();
    let place = crate::resolve::resolve(&made.path("file"), crate::resolve::Last::Keep).unwrap();
    let purpose = Purpose::Replace { new: hash_bytes(b"new"), old: Some(hash_bytes(OLD)) };
    let intent = intent(&place, ".cofferdam-0123456789abcdef.tmp", purpose);
    let mut note = files.store.note(&intent, &files.steps).unwrap();
    note.complete().unwrap();
    std::mem::forget(note);
    files.recover();
    let conflicts = contents(&home.path().join(".cofferdam/conflicts"));
    assert!(conflicts.contains(&OTHER.to_vec()) && conflicts.len() == 1);
    made.assert_clean("recovered");
    assert_eq!(contents(&home.path().join(".cofferdam/intents")).len(), 0);
}

#[test]
fn of_two_writers_with_one_stamp_exactly_one_wins() {
    for _ in 0..50 {
        let made = Made::new();
        let path = made.path("file");
        fs::write(&path, OLD).unwrap();
        let results: Vec<_> = std::thread::scope(|scope| {
            let writers: Vec<_> = [b"one", b"two"]
                .into_iter()
                .map(|text| {
                    let call = call(path.clone(), text, exactly(OLD));
                    scope.spawn(|| write(&made.files, call))
                })
                .collect();
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        let won: Vec<_> = results.iter().flatten().collect();
        assert_eq!(won.len(), 1, "{results:?}");
        let stamp = hash_bytes(&fs::read(&path).unwrap());
        assert_eq!(won[0].stamp, stamp);
        assert!(results.contains(&Err(FaultKind::Stale(Some(stamp)))), "{results:?}");
    }
}

#[test]
fn lines_that_a_program_appends_meanwhile_are_all_there_in_the_end() {
    const LINES: usize = 300;
    let made = Made::new();
    let path = made.path("log");
    fs::write(&path, "").unwrap();
    let done = AtomicBool::new(false);
    let won = std::thread::scope(|scope| {
        scope.spawn(|| {
            for line in 0..LINES {
                let mut file = OpenOptions::new().append(true).open(&path).unwrap();
                writeln!(file, "program {line}").unwrap();
            }
            done.store(true, Ordering::SeqCst);
        });
        let mut won = Vec::new();
        // One more turn when the program is done: that one wins.
        for turn in 0.. {
            let last = done.load(Ordering::SeqCst);
            let mut text = fs::read(&path).unwrap();
            let expected = exactly(&text);
            text.extend_from_slice(format!("tool {turn}\n").as_bytes());
            match write(&made.files, call(path.clone(), &text, expected)) {
                Ok(_) => won.push(turn),
                Err(FaultKind::Stale(_) | FaultKind::Conflict { .. }) => assert!(!last),
                Err(other) => panic!("{other:?}"),
            }
            if last {
                break;
            }
        }
        won
    });
    let mut all = made.conflicts();
    all.push(fs::read(&path).unwrap());
    let lines: BTreeSet<String> = all
        .iter()
        .flat_map(|one| one.split(|byte| *byte == b'\n'))
        .map(|line| String::from_utf8(line.to_vec()).unwrap())
        .collect();
    for line in 0..LINES {
        assert!(lines.contains(&format!("program {line}")), "{line} of {LINES}");
    }
    for turn in won {
        assert!(lines.contains(&format!("tool {turn}")), "{turn}");
    }
    made.assert_clean("appended");
}

#[test]
fn hostile_notes_are_removed_and_touch_nothing_else() {
    let made = Made::new();
    fs::write(made.path("precious"), "precious").unwrap();
    fs::create_dir(made.path(".cofferdam-0123456789abcdef.tmp")).unwrap();
    let notes = made.root.join("home/.cofferdam/intents");
    fs::create_dir_all(notes.join("0123456789abcdef")).unwrap();
    let undo = made.root.join("home/.cofferdam/undo");
    fs::create_dir_all(&undo).unwrap();
    let work = made.root.join("work").to_str().unwrap().as_bytes().to_vec();
    let purpose = Purpose::Replace { new: hash_bytes(b""), old: None };
    let aimed = |directory: &[u8], temporary: &str| {
        let (directory, temporary) = (directory.to_vec(), temporary.to_owned());
        let purpose = purpose.clone();
        Intent { directory, temporary, name: b"x".to_vec(), purpose }
    };
    let hostile = [
        Vec::new(),
        vec![0xff; 100],
        vec![0; 100_000],
        postcard::to_stdvec(&aimed(&work, "precious")).unwrap(),
        postcard::to_stdvec(&aimed(&work, "../work/precious")).unwrap(),
        postcard::to_stdvec(&aimed(&work, ".cofferdam-0123456789abcdef.tmp")).unwrap(),
        postcard::to_stdvec(&aimed(b"relative", ".cofferdam-0123456789abcdef.tmp")).unwrap(),
    ];
    for (number, bytes) in hostile.iter().enumerate() {
        fs::write(notes.join(format!("{number:016x}")), bytes).unwrap();
        fs::write(undo.join(format!("{number:016x}")), bytes).unwrap();
    }
    symlink(made.path("precious"), notes.join("fedcba9876543210")).unwrap();
    made.files.recover();
    assert_eq!(fs::read(made.path("precious")).unwrap(), b"precious");
    assert!(Path::new(&made.path(".cofferdam-0123456789abcdef.tmp")).is_dir());
    // A directory is none of ours.
    assert_eq!(fs::read_dir(&notes).unwrap().count(), 1);
    assert_eq!(fs::read_dir(&undo).unwrap().count(), 0);
    assert_eq!(made.conflicts().len(), 0);
}

#[test]
fn a_write_of_anything_that_is_always_overtaken_is_busy_and_not_stale() {
    for (expected, kind) in [
        (Expected::Any, FaultKind::Busy),
        (Expected::Exactly { stamp: hash_bytes(b"x"), or_absent: true }, FaultKind::Stale(None)),
    ] {
        let path = Arc::new(Mutex::new(String::new()));
        let told = Arc::clone(&path);
        let made = Made::with_steps(move |step| {
            let path = told.lock().unwrap().clone();
            match step {
                // Somebody makes it, and has removed it before it is looked at again.
                Step::Place => fs::write(&path, OTHER).unwrap(),
                Step::ForgetIntent => drop(fs::remove_file(&path)),
                _ => {}
            }
            Ok(())
        });
        *path.lock().unwrap() = made.path("file");
        assert_eq!(write(&made.files, call(made.path("file"), b"x", expected)), Err(kind));
        made.assert_clean("overtaken");
    }
}

#[test]
fn what_the_kernel_says_of_leases_and_file_systems_has_a_kind() {
    let made = Made::new();
    fs::write(made.path("file"), OLD).unwrap();
    let elsewhere = tempfile::tempdir_in("/dev/shm").unwrap();
    let to = elsewhere.path().join("file").to_str().unwrap().to_owned();
    let shift = FileCall::Move { from: made.path("file"), to, guard: guard(Expected::Any) };
    assert_eq!(ask(&made.files, shift, None).unwrap_err().kind, FaultKind::OtherFileSystem);
    assert_eq!(kernel("open", Errno::AGAIN).kind, FaultKind::Leased);
}

/// Leaves a saved content as a write in place does that is killed, and says where.
fn leave_saved(made: &Made, name: &str, old: &[u8], new: &[u8]) -> PathBuf {
    let saved = crate::in_place::Saved {
        target: made.path(name).into_bytes(),
        old: hash_bytes(old),
        new: hash_bytes(new),
    };
    let undo = made.root.join("home/.cofferdam/undo");
    fs::create_dir_all(&undo).unwrap();
    let path = undo.join("0123456789abcdef");
    fs::write(&path, [old, &saved.trailer().unwrap()].concat()).unwrap();
    path
}

#[test]
fn a_saved_content_stays_until_its_target_can_be_reached() {
    let made = Made::new();
    let saved = leave_saved(&made, "dir/file", OLD, b"new");
    made.files.recover();
    assert!(saved.exists(), "the directory is not there yet");
    fs::create_dir(made.path("dir")).unwrap();
    made.files.recover();
    assert!(saved.exists(), "the file is not there yet");
    fs::create_dir(made.path("other")).unwrap();
    fs::write(made.path("other/file"), "ne").unwrap();
    fs::remove_dir(made.path("dir")).unwrap();
    symlink("other", made.path("dir")).unwrap();
    made.files.recover();
    assert!(saved.exists(), "the path leads elsewhere");
    fs::remove_file(made.path("dir")).unwrap();
    fs::rename(made.path("other"), made.path("dir")).unwrap();
    // While a program holds a lease, nobody opens the file for writing without waiting.
    let leased = File::open(made.path("dir/file")).unwrap();
    assert!(cofferdam_sys::take_read_lease(leased.as_fd()).unwrap());
    made.files.recover();
    assert!(saved.exists(), "the file is leased");
    drop(leased);
    made.files.recover();
    assert_eq!(fs::read(made.path("dir/file")).unwrap(), OLD);
    assert_eq!(made.conflicts(), [b"ne"]);
    made.assert_clean("reached");
}

#[test]
fn what_a_file_holds_is_kept_before_an_old_content_is_put_back() {
    for (there, back, kept) in [
        (&b"somebody else's"[..], OLD, Some(&b"somebody else's"[..])),
        (b"new text", b"new text", None),
        (OLD, OLD, None),
        (b"", OLD, Some(b"")),
    ] {
        let made = Made::new();
        fs::write(made.path("file"), there).unwrap();
        leave_saved(&made, "file", OLD, b"new text");
        made.files.recover();
        assert_eq!(fs::read(made.path("file")).unwrap(), back);
        assert_eq!(made.conflicts(), kept.into_iter().collect::<Vec<_>>());
        made.assert_clean("put back");
    }
}

#[test]
fn a_write_in_place_that_cannot_be_undone_says_where_the_old_content_is() {
    let cut = AtomicUsize::new(0);
    let made = Made::with_steps(move |step| match step {
        Step::MakeTemporary => Err(Errno::ACCESS),
        // The first part is written, and the second is not.
        Step::WriteInPlace if cut.fetch_add(1, Ordering::SeqCst) > 0 => Err(Errno::IO),
        Step::Restore => Err(Errno::IO),
        _ => Ok(()),
    });
    fs::write(made.path("file"), OLD).unwrap();
    let (call, content) = Way::NoTemporary.call(&made.path("file"));
    let fault = ask(&made.files, call, Some(content)).unwrap_err();
    let FaultKind::Conflict { kept } = fault.kind else { panic!("{fault:?}") };
    assert_eq!((fault.step.as_str(), fault.errno), ("write", libc::EIO));
    assert!(fs::read(kept).unwrap().starts_with(OLD));
    let there = fs::read(made.path("file")).unwrap();
    assert!(new_text().starts_with(&there) && there.len() < new_text().len());
    Files::new(made.root.join("home")).recover();
    assert_eq!(fs::read(made.path("file")).unwrap(), OLD);
    assert_eq!(made.conflicts(), [there]);
    made.assert_clean("put back");
}
