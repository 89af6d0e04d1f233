use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};

use proptest::prelude::*;

use super::*;
use crate::search::testing::{Kept, Tree, as_ordinary_user, sum};

fn request(tree: &Tree, pattern: &str, path: &str) -> Glob {
    Glob {
        pattern: pattern.to_owned(),
        path: tree.path(path),
        limit: 1000,
        max_bytes: u64::MAX,
        include_ignored: false,
    }
}

struct Result {
    paths: Vec<String>,
    truncated: bool,
    account: Account,
}

fn answer(tree: &Tree, request: &Glob) -> Result {
    match glob_in(request, &tree.path(""), &Kept::new()).unwrap() {
        Answer::Found { paths, truncated, account, .. } => {
            let paths = paths.iter().map(|path| tree.below(path)).collect();
            Result { paths, truncated, account }
        }
        other => panic!("{other:?}"),
    }
}

fn paths(tree: &Tree, pattern: &str, path: &str) -> Vec<String> {
    answer(tree, &request(tree, pattern, path)).paths
}

fn fault(tree: &Tree, pattern: &str, path: &str) -> FaultKind {
    glob(&request(tree, pattern, path), &Kept::new()).unwrap_err().kind
}

fn reason(tree: &Tree, pattern: &str) -> String {
    match fault(tree, pattern, "") {
        FaultKind::BadPattern { reason } => reason,
        other => panic!("{other:?}"),
    }
}

/// C110.
#[test]
fn dot_directories_are_found_by_name() {
    let tree = Tree::with(&[".agent/skills/a.md", ".github/workflows/ci.yml", ".env"]);
    assert_eq!(paths(&tree, ".agent/**/*.md", ""), [".agent/skills/a.md"]);
    assert_eq!(paths(&tree, "**/*.yml", ".github"), [".github/workflows/ci.yml"]);
    assert_eq!(paths(&tree, ".env*", ""), [".env"]);
    assert_eq!(paths(&tree, ".*/workflows/*", ""), [".github/workflows/ci.yml"]);
}

/// C112.
#[test]
fn brackets_and_parentheses_in_names() {
    let tree = Tree::with(&["app/(shop)/[slug]/page.tsx", "app/[...all]/page.tsx"]);
    let slug = "app/(shop)/[slug]/page.tsx";
    assert_eq!(paths(&tree, "app/**/page.tsx", ""), [slug, "app/[...all]/page.tsx"]);
    assert_eq!(paths(&tree, "app/(shop)/*/page.tsx", ""), [slug]);
    assert_eq!(paths(&tree, "page.tsx", "app/(shop)/[slug]"), [slug]);
    assert_eq!(paths(&tree, r"app/(shop)/\[slug\]/*.tsx", ""), [slug]);
    assert_eq!(paths(&tree, slug, ""), [slug]);
}

/// C113.
#[test]
fn an_existing_path_is_found_whatever_its_characters_mean() {
    let tree = Tree::with(&["a b.txt", "{x}.txt", "[id].ts", "q?.md", "qa.md", "[broken", "i.ts"]);
    assert_eq!(paths(&tree, "a b.txt", ""), ["a b.txt"]);
    assert_eq!(paths(&tree, "{x}.txt", ""), ["{x}.txt"]);
    assert_eq!(paths(&tree, "[id].ts", ""), ["[id].ts", "i.ts"]);
    assert_eq!(paths(&tree, "q?.md", ""), ["q?.md", "qa.md"]);
    assert_eq!(paths(&tree, "[broken", ""), ["[broken"]);
    assert_eq!(paths(&tree, &tree.path("a b.txt"), "missing"), ["a b.txt"]);
    assert_eq!(paths(&tree, &tree.path("[id].ts"), "missing"), ["[id].ts", "i.ts"]);
}

/// C115.
#[test]
fn two_stars_cross_directories_and_one_does_not() {
    let tree = Tree::with(&["x.md", "a/x.md", "a/b/c/x.md"]);
    assert_eq!(paths(&tree, "**/x.md", ""), ["a/b/c/x.md", "a/x.md", "x.md"]);
    assert_eq!(paths(&tree, "a/**/x.md", ""), ["a/b/c/x.md", "a/x.md"]);
    assert_eq!(paths(&tree, "a/**", ""), ["a/b/c/x.md", "a/x.md"]);
    assert_eq!(paths(&tree, "b/c/*.md", ""), [""; 0]);
    assert_eq!(paths(&tree, "*/x.md", ""), ["a/x.md"]);
    assert_eq!(paths(&tree, "**", "").len(), 3);
    assert_eq!(paths(&tree, "./a/./x.md", ""), ["a/x.md"]);
}

/// C116.
#[test]
fn truncated_is_told_only_when_there_are_more() {
    let names: Vec<String> =
        (0..12).map(|number| format!("d{}/f{number:02}", number % 3)).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let tree = Tree::with(&names);
    let mut request = request(&tree, "**", "");
    let all = answer(&tree, &request);
    assert_eq!((all.paths.len(), all.truncated, all.account.complete), (12, false, true));
    for limit in 1..14 {
        request.limit = limit;
        let some = answer(&tree, &request);
        assert_eq!(some.paths, all.paths[..12.min(limit as usize)]);
        assert_eq!((some.truncated, some.account.complete), (limit < 12, limit >= 12));
    }
    request.limit = 1000;
    let bytes = |paths: &[String]| -> u64 {
        paths.iter().map(|path| tree.path(path).len() as u64 + 1).sum::<u64>() - 1
    };
    for count in 1..=12 {
        request.max_bytes = bytes(&all.paths[..count]);
        let some = answer(&tree, &request);
        assert_eq!((some.paths.as_slice(), some.truncated), (&all.paths[..count], count < 12));
        request.max_bytes -= 1;
        let fewer = answer(&tree, &request);
        assert_eq!((fewer.paths.as_slice(), fewer.truncated), (&all.paths[..count - 1], true));
    }
}

/// C118.
#[test]
fn what_cannot_be_read_is_counted_and_the_rest_is_found() {
    let tree = Tree::with(&["ok/a.txt", "bad/b.txt"]);
    symlink("nowhere", tree.root.join("dang.txt")).unwrap();
    fs::set_permissions(tree.root.join("bad"), fs::Permissions::from_mode(0o000)).unwrap();
    let result = as_ordinary_user(|| answer(&tree, &request(&tree, "**/*.txt", "")));
    fs::set_permissions(tree.root.join("bad"), fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(result.paths, ["ok/a.txt"]);
    let expected =
        Account { searched: 1, unreadable: 1, special: 1, complete: true, ..Account::default() };
    assert_eq!(result.account, expected);
    let here = request(&tree, "*", "bad");
    fs::set_permissions(tree.root.join("bad"), fs::Permissions::from_mode(0o000)).unwrap();
    let refused = as_ordinary_user(|| glob(&here, &Kept::new()));
    fs::set_permissions(tree.root.join("bad"), fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(refused.unwrap_err().kind, FaultKind::Denied);
}

/// C119.
#[test]
fn link_loops_end_and_deep_trees_are_walked() {
    let tree = Tree::with(&["n/a/x", "n/b/x", "n/f.js"]);
    symlink("../..", tree.root.join("n/a/up")).unwrap();
    symlink("../a", tree.root.join("n/b/a")).unwrap();
    let deep = format!("deep{}/end.js", "/d".repeat(150));
    tree.write(&deep, "");
    assert_eq!(paths(&tree, "**/*.js", ""), [deep.as_str(), "n/f.js"]);
}

#[test]
fn trees_deeper_than_the_longest_path_are_walked() {
    let tree = Tree::new();
    let part = "d".repeat(200);
    let mut at =
        rustix::fs::open(&tree.root, OFlags::PATH | OFlags::DIRECTORY, rustix::fs::Mode::empty())
            .unwrap();
    for _ in 0..50 {
        rustix::fs::mkdirat(&at, part.as_str(), rustix::fs::Mode::from_raw_mode(0o755)).unwrap();
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        at = rustix::fs::openat(&at, part.as_str(), flags, rustix::fs::Mode::empty()).unwrap();
    }
    let flags = OFlags::CREATE | OFlags::WRONLY;
    rustix::fs::openat(&at, "end.js", flags, rustix::fs::Mode::from_raw_mode(0o644)).unwrap();
    let found = paths(&tree, "**/*.js", "");
    assert_eq!(found, [format!("{}end.js", format!("{part}/").repeat(50))]);
}

/// C121.
#[test]
fn absolute_patterns_are_taken_and_upward_ones_refused() {
    let tree = Tree::with(&["in.txt", "sub/deep.txt"]);
    symlink("sub", tree.root.join("link")).unwrap();
    assert_eq!(paths(&tree, &tree.path("*.txt"), "missing"), ["in.txt"]);
    assert_eq!(paths(&tree, &tree.path("**/*.txt"), "sub"), ["in.txt", "sub/deep.txt"]);
    // Symlinks are followed in what is named, and not elsewhere.
    assert_eq!(paths(&tree, &tree.path("link/*"), ""), ["sub/deep.txt"]);
    assert_eq!(paths(&tree, "link/*", ""), ["sub/deep.txt"]);
    assert_eq!(paths(&tree, "l*/*", ""), [""; 0]);
    for pattern in ["../*", "sub/../../*", "/**/../x", ".."] {
        assert!(reason(&tree, pattern).contains("upwards"), "{pattern}");
    }
}

/// C122.
#[test]
fn a_missing_base_a_file_as_base_and_no_match_differ() {
    let tree = Tree::with(&["f.txt"]);
    assert_eq!(fault(&tree, "*", "srcc"), FaultKind::NotFound);
    assert_eq!(paths(&tree, "*", "f.txt"), ["f.txt"]);
    assert_eq!(paths(&tree, "f.txt", "f.txt"), ["f.txt"]);
    assert_eq!(fault(&tree, "*.md", "f.txt"), FaultKind::NotDirectory);
    assert_eq!(fault(&tree, "*", "f.txt/x"), FaultKind::NotDirectory);
    assert_eq!(fault(&tree, &tree.path("nowhere/*"), ""), FaultKind::NotFound);
    let none = answer(&tree, &request(&tree, "*.zzz", ""));
    assert_eq!((none.paths.len(), none.truncated), (0, false));
    assert_eq!(paths(&tree, "missing/*.txt", ""), [""; 0]);
    assert_eq!(paths(&tree, "f.txt/*", ""), [""; 0]);
}

/// C124.
#[test]
fn negation_is_refused_and_a_name_with_the_mark_is_reachable() {
    let tree = Tree::with(&["a.ts", "a.test.ts", "!x"]);
    assert!(reason(&tree, "!*.test.ts").contains("hint:"));
    assert_eq!(paths(&tree, "*.ts", ""), ["a.test.ts", "a.ts"]);
    assert_eq!(paths(&tree, "[!a]*", ""), ["!x"]);
    assert_eq!(paths(&tree, r"\!x", ""), ["!x"]);
}

/// C125.
#[test]
fn case_counts() {
    let tree = Tree::with(&["readme.md", "README.MD"]);
    assert_eq!(paths(&tree, "*.md", ""), ["readme.md"]);
    assert_eq!(paths(&tree, "*.MD", ""), ["README.MD"]);
}

#[test]
fn patterns_that_mean_nothing_say_so() {
    let tree = Tree::new();
    for pattern in ["", "[a", "{a", "a{b,c", "src/", "a\0b", "*{b,[}"] {
        assert!(!reason(&tree, pattern).is_empty(), "{pattern:?}");
    }
}

#[test]
fn git_directories_are_left_out_unless_they_are_named() {
    let tree = Tree::with(&[".git/config", "sub/.git/config", "sub/a", ".cofferdam-1.tmp"]);
    let all = answer(&tree, &request(&tree, "**", ""));
    assert_eq!(all.paths, ["sub/a"]);
    assert_eq!((all.account.hidden, all.account.searched), (3, 1));
    assert_eq!(paths(&tree, "**/.git/config", ""), [".git/config", "sub/.git/config"]);
    assert_eq!(paths(&tree, "**", "sub/.git"), ["sub/.git/config"]);
    assert_eq!(paths(&tree, ".git/*", ""), [".git/config"]);
}

#[test]
fn ignore_files_hide_and_what_is_named_is_not_hidden() {
    let tree = Tree::with(&["a.log", "build/o.txt", "src/a.rs", "src/gen/x.rs", "src/keep.log"]);
    tree.write(".gitignore", "build/\n*.log\n!keep.log\n");
    tree.write("src/.ignore", "gen\n");
    let all = answer(&tree, &request(&tree, "**", ""));
    assert_eq!(all.paths, [".gitignore", "src/.ignore", "src/a.rs", "src/keep.log"]);
    assert_eq!((all.account.ignored, all.account.searched), (3, 4));
    assert_eq!(paths(&tree, "build/*", ""), ["build/o.txt"]);
    assert_eq!(paths(&tree, "*", "build"), ["build/o.txt"]);
    assert_eq!(paths(&tree, "a.log", ""), ["a.log"]);
    let mut request = request(&tree, "**", "");
    request.include_ignored = true;
    assert_eq!(answer(&tree, &request).paths.len(), 7);
}

#[test]
fn ignore_files_above_a_directory_that_is_named_count_below_it() {
    let tree = Tree::with(&["pkg/app/node_modules/x.js", "pkg/app/a.js", "venv/lib/m.js"]);
    tree.write(".gitignore", "node_modules\n");
    tree.write("venv/.gitignore", "*\n");
    assert_eq!(paths(&tree, "**/*.js", "pkg/app"), ["pkg/app/a.js"]);
    assert_eq!(paths(&tree, "**/*.js", "pkg/app/node_modules"), ["pkg/app/node_modules/x.js"]);
    assert_eq!(paths(&tree, "**/*.js", "venv"), ["venv/lib/m.js"]);
    assert_eq!(paths(&tree, "**/*.js", "venv/lib"), ["venv/lib/m.js"]);
    assert_eq!(paths(&tree, "**/*.js", ""), ["pkg/app/a.js"]);
    // The workspace's own are not disregarded.
    tree.write(".gitignore", "*\n");
    assert_eq!(paths(&tree, "**", ""), [""; 0]);
}

#[test]
fn names_that_are_no_text_are_found_and_counted() {
    let tree = Tree::new();
    tree.write(b"caf\xe9.txt", "");
    tree.write(b"d\xff/a.txt", "");
    let result = answer(&tree, &request(&tree, "**/*.txt", ""));
    assert_eq!(result.paths, ["caf\u{fffd}.txt", "d\u{fffd}/a.txt"]);
    assert_eq!((result.account.non_utf8_name, result.account.searched), (1, 1));
}

#[test]
fn a_symlink_is_found_only_by_its_exact_name() {
    let tree = Tree::with(&["real.txt"]);
    symlink("real.txt", tree.root.join("link.txt")).unwrap();
    symlink("nowhere", tree.root.join("lost.txt")).unwrap();
    assert_eq!(paths(&tree, "*.txt", ""), ["real.txt"]);
    assert_eq!(paths(&tree, "link.txt", ""), ["link.txt"]);
    assert_eq!(paths(&tree, "lost.txt", ""), [""; 0]);
}

#[test]
fn a_walk_ends_when_nobody_waits() {
    let tree = Tree::new();
    for number in 0..300 {
        tree.write(format!("d{number}/f"), "");
    }
    let reply = Kept::for_looks(2);
    match glob(&request(&tree, "**", ""), &reply).unwrap() {
        Answer::Found { paths, account, .. } => {
            assert!(!account.complete && paths.len() < 300, "{}", paths.len());
        }
        other => panic!("{other:?}"),
    }
}

/// Whether a pattern matches a path, tried out every way; the reference for what is fast.
fn matches(pattern: &[u8], path: &[u8], at_start: bool) -> bool {
    let rest_matches = |skip: usize, from: usize| {
        matches(&pattern[skip..], &path[from..], path[..from].last() == Some(&b'/'))
    };
    match pattern {
        [] => path.is_empty(),
        // Any number of directories.
        [b'*', b'*', b'/', ..] if at_start => (0..=path.len())
            .filter(|from| *from == 0 || path[from - 1] == b'/')
            .any(|from| matches(&pattern[3..], &path[from..], true)),
        // Everything below a directory; the end of a pattern.
        [b'*', b'*'] if at_start => !path.is_empty(),
        [b'*', ..] => (0..=path.len())
            .take_while(|from| *from == 0 || path[from - 1] != b'/')
            .any(|from| rest_matches(1, from)),
        [b'?', ..] => path.first().is_some_and(|byte| *byte != b'/') && rest_matches(1, 1),
        [b'[', b'!', one, b']', ..] => {
            path.first().is_some_and(|byte| byte != one && *byte != b'/') && rest_matches(4, 1)
        }
        [b'{', first, b',', second, b'}', ..] => {
            path.first().is_some_and(|byte| byte == first || byte == second) && rest_matches(5, 1)
        }
        [literal, ..] => path.first() == Some(literal) && rest_matches(1, 1),
    }
}

fn pattern_strategy() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        Just("**".to_owned()),
        proptest::collection::vec(
            prop_oneof![
                "[abc.]",
                Just("*".to_owned()),
                Just("?".to_owned()),
                Just("[!a]".to_owned()),
                Just("{a,b}".to_owned())
            ],
            1..4
        )
        .prop_map(|parts| parts.concat())
        .prop_filter("two stars are a part of their own", |part| !part.contains("**")),
    ];
    proptest::collection::vec(part, 1..4)
        .prop_map(|parts| parts.join("/"))
        .prop_filter("upwards", |pattern| {
            !pattern.split('/').any(|part| part == ".." || part == ".")
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn globs_find_what_the_reference_finds(
        files in proptest::collection::btree_set("[abc]{1,2}(/[abc]{1,2}){0,3}", 1..12),
        pattern in pattern_strategy(),
    ) {
        let tree = Tree::new();
        let mut made = Vec::new();
        for file in &files {
            let path = tree.root.join(file);
            // A name may be a directory already, or have to be one.
            if fs::create_dir_all(path.parent().unwrap()).is_ok() && fs::write(&path, "").is_ok() {
                made.push(file.clone());
            }
        }
        let mut expected: Vec<String> = made
            .into_iter()
            .filter(|file| matches(pattern.as_bytes(), file.as_bytes(), true))
            .collect();
        expected.sort();
        prop_assert_eq!(paths(&tree, &pattern, ""), expected);
    }

    #[test]
    fn the_account_adds_up(
        files in proptest::collection::btree_set("[ab]{1,2}(/[ab]{1,2}){0,3}(\\.log)?", 1..12),
        ignored in "(a|b|\\*\\.log|/a|b/)\n",
    ) {
        let tree = Tree::new();
        for file in &files {
            let path = tree.root.join(file);
            if fs::create_dir_all(path.parent().unwrap()).is_ok() {
                let _ = fs::write(&path, "");
            }
        }
        let mut plain = request(&tree, "**", "");
        plain.include_ignored = true;
        let all = answer(&tree, &plain);
        prop_assert_eq!(sum(&all.account), all.paths.len() as u64);
        tree.write(".gitignore", &ignored);
        plain.include_ignored = false;
        let some = answer(&tree, &plain);
        prop_assert_eq!(some.account.searched, some.paths.len() as u64);
        prop_assert!(some.paths.len() <= all.paths.len() + 1);
        let hidden = all.paths.iter().any(|path| !some.paths.contains(path));
        prop_assert_eq!(some.account.ignored > 0, hidden);
    }
}
