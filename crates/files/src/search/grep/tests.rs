use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::call::Line;
use crate::search::testing::{Kept, Tree, as_ordinary_user, sum};

fn request(tree: &Tree, pattern: &str, path: &str) -> Grep {
    Grep {
        pattern: pattern.to_owned(),
        path: tree.path(path),
        glob: None,
        file_type: None,
        ignore_case: false,
        literal: false,
        multiline: false,
        context: 0,
        limit: 100,
        mode: GrepMode::Content,
        include_ignored: false,
        max_line_chars: 2000,
        max_bytes: None,
    }
}

#[derive(Debug, PartialEq)]
struct Found {
    files: Vec<FileMatches>,
    matches: u64,
    count: u64,
    out_of_bytes: bool,
    account: Account,
}

fn run(tree: &Tree, request: &Grep) -> Result<Found, Fault> {
    let reply = Kept::new();
    let last = grep_in(request, &tree.path(""), &reply)?;
    let files = reply
        .answers
        .into_inner()
        .unwrap()
        .into_iter()
        .map(|answer| match answer {
            Answer::Matches(found) => found,
            other => panic!("{other:?}"),
        })
        .collect();
    match last {
        Answer::Searched { matches, files: count, out_of_bytes, account, .. } => {
            Ok(Found { files, matches, count, out_of_bytes, account })
        }
        other => panic!("{other:?}"),
    }
}

/// Matching lines, as `path:number:text`.
fn hits(tree: &Tree, request: &Grep) -> Vec<String> {
    let found = run(tree, request).unwrap();
    let line = |file: &FileMatches, line: &Line| {
        format!("{}:{}:{}", tree.below(&file.path), line.number, line.text)
    };
    let files = found.files.iter();
    files.flat_map(|file| file.lines.iter().map(move |one| line(file, one))).collect()
}

fn simple(tree: &Tree, pattern: &str, path: &str) -> Vec<String> {
    hits(tree, &request(tree, pattern, path))
}

fn reason(tree: &Tree, request: &Grep) -> String {
    match run(tree, request).unwrap_err().kind {
        FaultKind::BadPattern { reason } => reason,
        other => panic!("{other:?}"),
    }
}

/// C127, C145.
#[test]
fn patterns_that_are_not_understood_say_why() {
    let tree = Tree::with(&["f"]);
    for (pattern, word) in [
        ("foo(?=bar)", "look-around"),
        ("foo(", "unclosed group"),
        ("[a", "unclosed character class"),
        ("*x", "repetition operator missing expression"),
        (r"(?P<n>foo)\1", "backreferences"),
        ("", "empty"),
        ("a\nb", "multiline"),
        (r"a\nb", "multiline"),
    ] {
        let reason = reason(&tree, &request(&tree, pattern, ""));
        assert!(reason.contains(word), "{pattern}: {reason}");
    }
    let literal = Grep { literal: true, ..request(&tree, "foo(", "") };
    assert_eq!(run(&tree, &literal).unwrap().matches, 0);
}

#[test]
fn patterns_that_would_take_hours_are_refused_and_useful_ones_are_not() {
    let tree = Tree::new();
    tree.write("f", "aaaa word\n");
    for bomb in ["(a{1,1000}){1,1000}", "(a{1,300}){1,300}", r"(\w{1,30}){1,30}"] {
        let reason = reason(&tree, &request(&tree, bomb, ""));
        assert!(reason.contains("size limit"), "{bomb}: {reason}");
    }
    for useful in [r"\w{1,20}\s+\w{1,20}", r"(?i)a{1,100}", r"\p{L}+ \p{L}+", "a{4}"] {
        assert_eq!(simple(&tree, useful, "").len(), 1, "{useful}");
    }
}

/// C128.
#[test]
fn one_dialect() {
    let tree = Tree::new();
    tree.write("d.txt", "foo1\nbar22\nworda\n");
    let count = |pattern: &str| simple(&tree, pattern, "").len();
    assert_eq!(count("foo|bar"), 2);
    assert_eq!(count(r"\d{2}"), 1);
    assert_eq!(count(r"\bfoo1\b"), 1);
    assert_eq!(count("o+1"), 1);
    assert_eq!(count(r"(foo|bar)\d+"), 2);
    assert_eq!(count("FOO"), 0);
    let ignoring_case = Grep { ignore_case: true, ..request(&tree, "FOO", "") };
    assert_eq!(hits(&tree, &ignoring_case), ["d.txt:1:foo1"]);
}

/// C130.
#[test]
fn a_nul_byte_ends_the_search_unless_the_file_is_named() {
    let tree = Tree::with(&["plain.txt"]);
    tree.write("z.c", "needle one\nab\0cd\nneedle two\n");
    let found = run(&tree, &request(&tree, "needle", "")).unwrap();
    let binary: Vec<bool> = found.files.iter().map(|file| file.binary).collect();
    assert_eq!((found.matches, binary), (2, vec![false, true]));
    assert_eq!((found.account.binary, found.account.searched), (1, 1));
    assert_eq!(simple(&tree, "needle", "z.c"), ["z.c:1:needle one", "z.c:3:needle two"]);
    assert_eq!(run(&tree, &request(&tree, "two", "")).unwrap().account.binary, 1);
}

/// C131.
#[test]
fn long_lines_are_cut_around_the_match() {
    let tree = Tree::new();
    let long = format!("{}NEEDLE{}\n", "a".repeat(300_000), "b".repeat(300_000));
    tree.write("min.js", long);
    tree.write("s.js", "NEEDLE small\n");
    let found = run(&tree, &request(&tree, "NEEDLE", "")).unwrap();
    let line = &found.files[0].lines[0];
    assert!(line.cut && line.text.contains("NEEDLE") && line.text.len() < 2100);
    assert!(line.text.starts_with("[truncated] a") && line.text.ends_with("b [truncated]"));
    assert!(!found.files[1].lines[0].cut);
}

#[test]
fn a_line_that_does_not_fit_into_memory_is_told() {
    let tree = Tree::with(&["small"]);
    tree.write("large", "x".repeat(HEAP_BYTES_MAX + 1));
    let found = run(&tree, &request(&tree, "needle", "")).unwrap();
    assert_eq!((found.matches, found.account.too_large, found.account.searched), (1, 1, 1));
}

/// C133.
#[test]
fn what_is_named_is_searched() {
    let tree = Tree::with(&["venv/lib/m.py", "build/o.txt", ".hid"]);
    tree.write(".git/config", "needle\n");
    tree.write("venv/.gitignore", "*\n");
    tree.write(".gitignore", "build/\n");
    let count = |path: &str| {
        let found = run(&tree, &request(&tree, "needle", path)).unwrap();
        (found.matches, found.account.ignored)
    };
    assert_eq!(count("venv/lib/m.py"), (1, 0));
    assert_eq!(count("venv"), (1, 0));
    assert_eq!(count("build"), (1, 0));
    assert_eq!(count("build/o.txt"), (1, 0));
    assert_eq!(count(".hid"), (1, 0));
    assert_eq!(count(".git"), (1, 0));
    // Everything in venv, its ignore file too, and build.
    assert_eq!(count(""), (1, 3));
}

/// C136.
#[test]
fn names_with_colons_and_line_feeds_stay_whole() {
    let tree = Tree::with(&["a-1-b.txt", "n\nl.txt"]);
    tree.write("name:52:file.txt", "x:1:needle\n");
    for context in [0, 1] {
        let request = Grep { context, ..request(&tree, "needle", "") };
        let expected = ["a-1-b.txt:1:needle", "n\nl.txt:1:needle", "name:52:file.txt:1:x:1:needle"];
        assert_eq!(hits(&tree, &request), expected);
    }
}

/// C137.
#[test]
fn context_is_merged_and_counts_as_no_match() {
    let tree = Tree::new();
    tree.write("c.txt", "a\nHIT\nb\nHIT\nc\n");
    let mut request = Grep { context: 1, ..request(&tree, "HIT", "") };
    let found = run(&tree, &request).unwrap();
    let marks: Vec<(u64, bool)> =
        found.files[0].lines.iter().map(|line| (line.number, line.matched)).collect();
    assert_eq!(marks, [(1, false), (2, true), (3, false), (4, true), (5, false)]);
    assert_eq!((found.matches, found.count), (2, 1));
    request.mode = GrepMode::Count;
    let found = run(&tree, &request).unwrap();
    assert_eq!((found.files[0].matches, found.files[0].lines.len(), found.count), (2, 0, 1));
    request.mode = GrepMode::Files;
    assert_eq!(run(&tree, &request).unwrap().files.len(), 1);
}

/// C139.
#[test]
fn pipes_and_sockets_are_not_opened() {
    let tree = Tree::with(&["a.txt"]);
    let made = Command::new("mkfifo").arg(tree.root.join("pipe")).status().unwrap();
    assert!(made.success());
    let _socket = UnixListener::bind(tree.root.join("sock")).unwrap();
    let begun = Instant::now();
    let found = run(&tree, &request(&tree, "needle", "")).unwrap();
    assert_eq!((found.matches, found.account.special), (1, 2));
    let refused = run(&tree, &request(&tree, "needle", "pipe")).unwrap_err();
    assert_eq!(refused.kind, FaultKind::NotRegular(FileKind::Fifo));
    assert!(begun.elapsed() < Duration::from_secs(3));
}

/// C140.
#[test]
fn types_choose_files_and_unknown_ones_name_near_ones() {
    let tree = Tree::with(&["a.tsx", "b.py", "c.ts", "d.rs"]);
    let of = |name: &str| Grep { file_type: Some(name.to_owned()), ..request(&tree, "needle", "") };
    assert_eq!(hits(&tree, &of("ts")), ["a.tsx:1:needle", "c.ts:1:needle"]);
    assert_eq!(hits(&tree, &of("py")), ["b.py:1:needle"]);
    assert_eq!(hits(&tree, &of("python")), ["b.py:1:needle"]);
    assert!(reason(&tree, &of("nosuch")).contains("no file type \"nosuch\""));
    assert!(reason(&tree, &of("rusty")).contains("rust"));
    assert!(reason(&tree, &of("tsx")).contains("ts"));
}

#[test]
fn a_glob_chooses_files_as_ripgrep_does() {
    let tree = Tree::with(&["a.rs", "src/a.rs", "src/b.txt", "src/deep/c.rs", "A.RS"]);
    let of = |glob: &str| {
        let request = Grep { glob: Some(glob.to_owned()), ..request(&tree, "needle", "") };
        run(&tree, &request)
            .unwrap()
            .files
            .iter()
            .map(|file| tree.below(&file.path))
            .collect::<Vec<_>>()
    };
    assert_eq!(of("*.rs"), ["a.rs", "src/a.rs", "src/deep/c.rs"]);
    assert_eq!(of("src/*.rs"), ["src/a.rs"]);
    assert_eq!(of("/*.rs"), ["a.rs"]);
    assert_eq!(of("!src"), ["A.RS", "a.rs"]);
    assert_eq!(of("*.{txt,RS}"), ["A.RS", "src/b.txt"]);
    let bad = Grep { glob: Some("[a".to_owned()), ..request(&tree, "needle", "") };
    assert!(reason(&tree, &bad).contains("glob"));
    // A file that was named is searched whatever the glob says.
    let named = Grep { glob: Some("*.md".to_owned()), ..request(&tree, "needle", "a.rs") };
    assert_eq!(run(&tree, &named).unwrap().matches, 1);
}

/// C142.
#[test]
fn links_are_not_followed_below_what_is_named() {
    let outside = Tree::with(&["secret.txt"]);
    let tree = Tree::with(&["a.txt"]);
    symlink(outside.root.join("secret.txt"), tree.root.join("notes.txt")).unwrap();
    symlink(&outside.root, tree.root.join("dir")).unwrap();
    let found = run(&tree, &request(&tree, "needle", "")).unwrap();
    assert_eq!((found.matches, found.account.special), (1, 2));
}

/// C145.
#[test]
fn the_limit_is_told_only_when_there_are_more() {
    let tree = Tree::new();
    tree.write("s.txt", (1..=100_000).map(|line| format!("{line}\n")).collect::<String>());
    tree.write("t.txt", (1..=100).map(|line| format!("{line}\n")).collect::<String>());
    for pattern in [".*", "^"] {
        let found = run(&tree, &request(&tree, pattern, "")).unwrap();
        let told: Vec<_> =
            found.files.iter().map(|file| (file.lines.len(), file.limit_reached)).collect();
        assert_eq!(told, [(100, true), (100, false)]);
    }
    let count = Grep { mode: GrepMode::Count, ..request(&tree, "^", "") };
    assert_eq!(run(&tree, &count).unwrap().matches, 100_100);
}

/// C146.
#[test]
fn other_encodings_are_searched() {
    let tree = Tree::new();
    tree.write("l1.txt", b"caf\xe9 needle\n");
    tree.write("u16.txt", b"\xff\xfen\0e\0e\0d\0l\0e\0\n\0");
    tree.write("u8.txt", b"\xef\xbb\xbfneedle\r\n");
    let expected = [("caf\u{fffd} needle", true), ("needle", false), ("needle\r", false)];
    let plain = run(&tree, &request(&tree, "needle", "")).unwrap();
    let plain: Vec<(&str, bool)> =
        plain.files.iter().map(|file| (file.lines[0].text.as_str(), file.lossy)).collect();
    assert_eq!(plain, expected);
}

#[test]
fn matches_may_span_lines() {
    let tree = Tree::new();
    tree.write("a", "one\nfn x(\n  y,\n) z\nlast fn x(y)\n");
    let request = Grep { multiline: true, ..request(&tree, r"fn x\([^)]*\)", "") };
    let expected = ["a:2:fn x(", "a:3:  y,", "a:4:) z", "a:5:last fn x(y)"];
    assert_eq!(hits(&tree, &request), expected);
    let limited = run(&tree, &Grep { limit: 2, ..request }).unwrap();
    assert_eq!((limited.files[0].lines.len(), limited.files[0].limit_reached), (2, true));
}

/// C118 for lines.
#[test]
fn what_cannot_be_read_is_counted() {
    let tree = Tree::with(&["a", "b", "c/d"]);
    for path in ["b", "c"] {
        fs::set_permissions(tree.root.join(path), fs::Permissions::from_mode(0o000)).unwrap();
    }
    let (found, named) = as_ordinary_user(|| {
        (
            run(&tree, &request(&tree, "needle", "")).unwrap(),
            run(&tree, &request(&tree, "needle", "b")),
        )
    });
    fs::set_permissions(tree.root.join("c"), fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!((found.matches, found.account.unreadable, found.account.searched), (1, 2, 1));
    assert_eq!(named.unwrap_err().kind, FaultKind::Denied);
}

#[test]
fn missing_paths_are_faults() {
    let tree = Tree::with(&["a"]);
    assert_eq!(run(&tree, &request(&tree, "x", "b")).unwrap_err().kind, FaultKind::NotFound);
    assert_eq!(run(&tree, &request(&tree, "x", "a/b")).unwrap_err().kind, FaultKind::NotDirectory);
}

/// A tree large enough for all threads, with some of everything.
fn mixed() -> Tree {
    let tree = Tree::new();
    for number in 0..600 {
        let lines: String =
            (0..number % 37).map(|line| format!("needle {number} {line}\n")).collect();
        let binary = if number % 50 == 0 { "\0" } else { "" };
        tree.write(format!("d{}/e{}/f{number}", number % 7, number % 11), lines + binary);
    }
    tree.write(".gitignore", "f1?\n");
    tree
}

#[test]
fn answers_have_an_order_and_are_the_same_every_time() {
    let tree = mixed();
    for max_bytes in [None, Some(20_000)] {
        let request = Grep { max_bytes, context: 1, ..request(&tree, "[13]$", "") };
        let first = run(&tree, &request).unwrap();
        let paths: Vec<_> = first.files.iter().map(|file| &file.path).collect();
        assert!(paths.is_sorted());
        assert_eq!(first.out_of_bytes, max_bytes.is_some());
        assert_eq!(first.account.complete, max_bytes.is_none());
        if max_bytes.is_none() {
            assert_eq!(sum(&first.account), 601);
        }
        for _ in 0..20 {
            assert_eq!(run(&tree, &request).unwrap(), first);
        }
    }
}

#[test]
fn bytes_are_bounded_exactly() {
    let tree = mixed();
    let bytes = |found: &Found| -> u64 {
        let lines = found.files.iter().flat_map(|file| &file.lines);
        lines.map(|line| line.text.len() as u64 + 1).sum()
    };
    let all = run(&tree, &request(&tree, "needle", "")).unwrap();
    let whole = bytes(&all);
    for max_bytes in [0, 1, 500, whole / 2, whole - 1, whole] {
        let some = run(&tree, &Grep { max_bytes: Some(max_bytes), ..request(&tree, "needle", "") })
            .unwrap();
        assert!(bytes(&some) <= max_bytes);
        assert_eq!(some.out_of_bytes, max_bytes < whole);
        let lines =
            |found: &Found| -> u64 { found.files.iter().map(|file| file.lines.len() as u64).sum() };
        assert_eq!(some.matches, lines(&some));
    }
}

#[test]
fn files_with_many_matches_come_in_parts() {
    let tree = Tree::new();
    let line = format!("needle {}\n", "x".repeat(1000));
    for file in ["a", "b", "c"] {
        tree.write(file, line.repeat(3000));
    }
    let request = Grep { limit: 2500, ..request(&tree, "needle", "") };
    let found = run(&tree, &request).unwrap();
    for path in ["a", "b", "c"] {
        let parts: Vec<_> =
            found.files.iter().filter(|file| tree.below(&file.path) == path).collect();
        assert!(parts.len() > 2);
        for part in &parts {
            assert!(part.lines.iter().map(|line| line.text.len()).sum::<usize>() < 256 * 1024);
        }
        let numbers = parts.iter().flat_map(|part| part.lines.iter().map(|line| line.number));
        assert!(numbers.eq(1..=2500));
        let last = parts[parts.len() - 1];
        assert_eq!((last.matches, last.limit_reached), (2500, true));
    }
    assert_eq!((found.matches, found.count), (7500, 3));
}

#[test]
fn a_search_ends_when_nobody_waits() {
    let tree = mixed();
    for looks in 0..5 {
        let reply = Kept::for_looks(looks);
        match grep(&request(&tree, "needle", ""), &reply).unwrap() {
            Answer::Searched { account, .. } => assert!(!account.complete),
            other => panic!("{other:?}"),
        }
    }
}

/// Set in the process that has a limit of processes.
const LIMITED: &str = "COFFERDAM_TEST_LIMITED";

#[test]
fn a_search_goes_on_without_more_threads() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    if std::env::var_os(LIMITED).is_none() {
        // The limit is one of the whole process, so it must not be that of other tests.
        let name = "search::grep::tests::a_search_goes_on_without_more_threads";
        let mut command = Command::new(std::env::current_exe().unwrap());
        let output = command.args(["--exact", name]).env(LIMITED, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("1 passed"), "{text}");
        return;
    }
    let tree = mixed();
    let whole = run(&tree, &request(&tree, "needle", "")).unwrap();
    let (limited, another) = as_ordinary_user(|| {
        let maximum = getrlimit(Resource::Nproc).maximum;
        setrlimit(Resource::Nproc, Rlimit { current: Some(1), maximum }).unwrap();
        let found = run(&tree, &request(&tree, "needle", "")).unwrap();
        (found, thread::Builder::new().spawn(|| ()).is_ok())
    });
    assert!(!another, "the limit had no effect");
    assert_eq!(limited, whole);
}

/// What ripgrep finds, as `path:number:text` with a dash for context.
fn ripgrep(tree: &Tree, request: &Grep) -> Vec<String> {
    let mut command = Command::new("rg");
    command
        .args(["--no-config", "--hidden", "--no-ignore-global", "--no-ignore-parent"])
        .args(["--no-require-git", "--glob=!.git", "--null", "--no-heading", "--line-number"])
        .args(["--color=never", "--sort=path", "--no-context-separator", "--no-messages"])
        .arg(format!("--context={}", request.context))
        .args(request.ignore_case.then_some("--ignore-case"))
        .args(request.literal.then_some("--fixed-strings"))
        .args(request.multiline.then_some("--multiline"))
        .args(["--regexp", &request.pattern, "--", "."])
        .current_dir(&tree.root);
    let output = command.output().expect("ripgrep is among the packages of .ci/run");
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines: Vec<String> =
        text.lines().map(|line| line.strip_prefix("./").unwrap().replacen('\0', ":", 1)).collect();
    lines.sort();
    lines
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn lines_are_those_that_ripgrep_finds(
        files in proptest::collection::btree_map(
            "[abc](/[abc]){0,2}\\.(md|rs)", "([abä .]{0,6}\n){0,12}[ab]{0,3}", 1..8,
        ),
        ignored in proptest::option::of((
            "([abc]/)?", "(\\*\\.md|[abc]|/[abc]|!a\\.rs)\n(b/|!\\*\\.md|\\*)\n?",
        )),
        pattern in "(a|b|ä|\\.|a\\+|\\^a|b\\$|\\\\b|\\[ab\\]|a\\|b|\\(a\\)){1,3}",
        (context, ignore_case, literal) in (0u32..3, any::<bool>(), any::<bool>()),
        multiline in any::<bool>(),
    ) {
        let tree = Tree::new();
        for (path, content) in &files {
            tree.write(path, content);
        }
        if let Some((directory, rules)) = &ignored
            && (directory.is_empty() || tree.root.join(directory).is_dir())
        {
            tree.write(format!("{directory}.gitignore"), rules);
        }
        let request = Grep {
            context, ignore_case, literal, multiline, limit: 1000, ..request(&tree, &pattern, "")
        };
        let found = run(&tree, &request).unwrap();
        let mut lines: Vec<String> = Vec::new();
        for file in &found.files {
            for line in &file.lines {
                let mark = if line.matched { ':' } else { '-' };
                let path = tree.below(&file.path);
                lines.push(format!("{path}:{}{mark}{}", line.number, line.text));
            }
        }
        lines.sort();
        prop_assert_eq!(lines, ripgrep(&tree, &request));
    }
}

#[test]
fn names_that_are_no_text_are_told_raw() {
    let tree = Tree::new();
    tree.write(b"caf\xe9.txt", "needle\n");
    let found = run(&tree, &request(&tree, "needle", "")).unwrap();
    assert_eq!(found.files[0].path, [tree.root.as_os_str().as_bytes(), b"/caf\xe9.txt"].concat());
    assert_eq!((found.account.non_utf8_name, found.account.searched), (1, 0));
}
