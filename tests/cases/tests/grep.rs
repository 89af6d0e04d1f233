//! The cases of the area `grep`.
#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use cofferdam_e2e::{Daemon, Options, ToolReply, both};
use cofferdam_proto::v1;
use serde_json::json;

/// What a search without results says to the model.
const NOTHING: &str = "No matches found";

/// A grep in one file or directory of the workspace.
async fn within_path(daemon: &Daemon, pattern: &str, path: &str) -> ToolReply {
    let input = json!({ "pattern": pattern, "path": format!("/workspace/{path}") });
    daemon.call("grep", input).await
}

/// Asserts the lines that were found, in any order of files, and their number.
#[track_caller]
fn expect_lines(grep: &ToolReply, lines: &[&str]) {
    let mut right = lines.to_vec();
    right.sort_unstable();
    let mut found = if grep.ok().number("matchCount") == 0 { Vec::new() } else { grep.lines() };
    found.sort_unstable();
    assert_eq!(found, right, "{}", grep.describe());
    assert_eq!(grep.number("matchCount"), lines.len() as u64, "{}", grep.describe());
}

/// The files that FilesystemService.Grep finds, with the numbers of their matching lines.
async fn structured(daemon: &Daemon, pattern: &str) -> Vec<(String, Vec<u64>)> {
    let request = v1::GrepRequest { pattern: pattern.to_owned(), ..v1::GrepRequest::default() };
    let mut parts = daemon.files().grep(request).await.expect("it answers").into_inner();
    let mut found = Vec::new();
    while let Some(part) = parts.message().await.expect("the stream goes on") {
        if let Some(v1::grep_response::Part::File(file)) = part.part {
            let matched = file.lines.iter().filter(|line| line.matched);
            found.push((file.path, matched.map(|line| line.number).collect()));
        }
    }
    found.sort();
    found
}

/// A search configuration, and ignore files above the workspace and in the daemon's home.
fn misleading(root: &Path) {
    fs::write(root.join("rgconf"), "--max-count=1\n--heading\n--color=always\n").expect("a file");
    for directory in ["", "home"] {
        for name in [".ignore", ".gitignore", ".rgignore"] {
            fs::write(root.join(directory).join(name), "*\n").expect("a file");
        }
    }
}

/// A directory with nothing but what starts the daemon.
fn bare_path(root: &Path) {
    let bin = root.join("bin");
    fs::create_dir(&bin).expect("a directory");
    for program in ["/usr/bin/setpriv", "/bin/setpriv"] {
        if Path::new(program).exists() && !bin.join("setpriv").exists() {
            symlink(program, bin.join("setpriv")).expect("a link");
        }
    }
}

both! {
    async fn c127_invalid_pattern_is_an_error(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("echo foobar > f").await.expect(0, "");
        for pattern in ["foo(?=bar)", "foo(", "[a", "*x", "(?P<n>foo)\\1"] {
            let grep = daemon.grep(pattern).await;
            if grep.is_error {
                let error = grep.err();
                assert!(!error.message.contains(NOTHING), "{pattern}: {error:?}");
                let why = ["look", "unclosed", "repetition", "backreference"];
                let said = error.message.to_lowercase();
                assert!(why.iter().any(|word| said.contains(word)), "{pattern}: {error:?}");
            } else {
                assert!(grep.number("matchCount") >= 1, "{pattern}: {}", grep.describe());
            }
        }
        expect_lines(&daemon.grep("foo").await, &["/workspace/f:1:foobar"]);
    }

    async fn c128_dialect(who) {
        let env = vec![("PATH".to_owned(), "{}/bin".to_owned())];
        let bare = Options { env, before: Some(bare_path), ..Options::default() };
        for options in [Options::default(), bare] {
            let daemon = Daemon::start_with(who, options).await;
            daemon.put_text("d.txt", "foo1\nbar22\nworda\n");
            let first = "/workspace/d.txt:1:foo1";
            let second = "/workspace/d.txt:2:bar22";
            expect_lines(&daemon.grep("foo|bar").await, &[first, second]);
            expect_lines(&daemon.grep("\\d{2}").await, &[second]);
            expect_lines(&daemon.grep("\\bfoo1\\b").await, &[first]);
            expect_lines(&daemon.grep("o+1").await, &[first]);
            expect_lines(&daemon.grep("(foo|bar)\\d+").await, &[first, second]);
        }
    }

    async fn c130_text_with_one_nul(who) {
        let daemon = Daemon::start(who).await;
        let make = "printf 'needle one\\nab\\0cd\\nneedle two\\n' > z.c; echo needle > plain.txt";
        daemon.shell(make).await.expect(0, "");
        let all = daemon.grep("needle").await;
        assert!(all.lines().contains(&"/workspace/plain.txt:1:needle"), "{}", all.describe());
        let one = within_path(&daemon, "needle", "z.c").await;
        for grep in [&all, &one] {
            let named = [grep.ok().text("content"), grep.text_or_empty("note")].concat();
            assert!(named.contains("/workspace/z.c"), "{}", grep.describe());
            assert!(!grep.json.to_string().contains("\\u0000"), "{}", grep.describe());
        }
        assert!(one.text("content") != NOTHING || !one.text("note").is_empty(), "{}", one.describe());
    }

    async fn c131_minified_file(who) {
        let daemon = Daemon::start(who).await;
        let make = "{ head -c 300000 /dev/zero | tr '\\0' a; printf NEEDLE; \
                    head -c 300000 /dev/zero | tr '\\0' b; echo; } > min.js; echo 'NEEDLE small' > s.js";
        daemon.shell(make).await.expect(0, "");
        let grep = daemon.grep("NEEDLE").await;
        let lines = grep.lines();
        assert_eq!((lines.len(), grep.number("matchCount")), (2, 2), "{}", grep.describe());
        assert!(lines.contains(&"/workspace/s.js:1:NEEDLE small"), "{}", grep.describe());
        let preview = lines.iter().find(|line| line.starts_with("/workspace/min.js:1:"));
        let preview = preview.expect("min.js is reported");
        assert!(preview.contains("NEEDLE"), "{preview}");
        assert!(preview.len() < 5000, "{}", preview.len());
        assert!(grep.flag("truncated"), "{}", grep.describe());
        assert!(grep.json.to_string().len() < 20_000, "{}", grep.json.to_string().len());
    }

    async fn c133_ignored_but_named(who) {
        let daemon = Daemon::start(who).await;
        let make = "git init -q; mkdir -p venv/lib build; echo '*' > venv/.gitignore; \
                    echo needle > venv/lib/m.py; echo build/ > .gitignore; \
                    echo needle > build/o.txt; echo needle > .hid";
        daemon.shell(make).await.expect(0, "");
        let venv = "/workspace/venv/lib/m.py:1:needle";
        for (path, line) in [
            ("venv/lib/m.py", venv),
            ("venv", venv),
            ("build", "/workspace/build/o.txt:1:needle"),
            (".hid", "/workspace/.hid:1:needle"),
        ] {
            expect_lines(&within_path(&daemon, "needle", path).await, &[line]);
        }
        let all = daemon.grep("needle").await;
        assert!(all.ok().number("matchCount") <= 3, "{}", all.describe());
        let left_out = all.skipped("ignored") + all.skipped("hidden");
        assert!(all.number("matchCount") == 3 || left_out > 0, "{}", all.describe());
        assert!(all.number("matchCount") > 0 || !all.text("note").is_empty(), "{}", all.describe());
    }

    async fn c134_config_of_the_user_and_ignore_files_above(who) {
        let env = vec![("RIPGREP_CONFIG_PATH".to_owned(), "{}/rgconf".to_owned())];
        let options = Options { env, before: Some(misleading), ..Options::default() };
        let daemon = Daemon::start_with(who, options).await;
        let make = "git init -q; printf 'n\\nn\\nn\\n' > a.txt; mkdir -p ~/.config/git; \
                    echo '*' | tee ~/.ignore ~/.gitignore > ~/.config/git/ignore";
        daemon.shell(make).await.expect(0, "");
        let grep = daemon.grep("^n$").await;
        let a = "/workspace/a.txt";
        expect_lines(&grep, &[&format!("{a}:1:n"), &format!("{a}:2:n"), &format!("{a}:3:n")]);
        assert!(!grep.text("content").contains('\u{1b}'), "{}", grep.describe());
    }

    async fn c136_names_with_colons_and_numbers(who) {
        let daemon = Daemon::start(who).await;
        let make = "echo 'x:1:needle' > 'name:52:file.txt'; echo needle > a-1-b.txt; \
                    echo needle > $'n\\nl.txt'";
        daemon.shell(make).await.expect(0, "");
        let around = json!({ "pattern": "needle", "context": 1 });
        for grep in [daemon.grep("needle").await, daemon.call("grep", around).await] {
            assert_eq!(grep.ok().number("matchCount"), 3, "{}", grep.describe());
            let lines: Vec<&str> =
                grep.lines().into_iter().filter(|line| line.contains("needle")).collect();
            assert_eq!(lines.len(), 3, "{}", grep.describe());
            for line in ["/workspace/name:52:file.txt:1:x:1:needle", "/workspace/a-1-b.txt:1:needle"] {
                assert!(lines.contains(&line), "{line}: {}", grep.describe());
            }
            let escaped = |line: &&&str| {
                line.starts_with("/workspace/n") && line.ends_with("l.txt:1:needle")
            };
            assert_eq!(lines.iter().filter(escaped).count(), 1, "{}", grep.describe());
        }
        let right: Vec<(String, Vec<u64>)> = ["a-1-b.txt", "n\nl.txt", "name:52:file.txt"]
            .iter().map(|name| (format!("/workspace/{name}"), vec![1])).collect();
        assert_eq!(structured(&daemon, "needle").await, right);
    }

    async fn c137_context_lines_are_not_hits(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("printf 'a\\nHIT\\nb\\nHIT\\nc\\n' > c.txt").await.expect(0, "");
        let grep = daemon.call("grep", json!({ "pattern": "HIT", "context": 1 })).await;
        let c = "/workspace/c.txt";
        let right = [
            format!("{c}-1-a"), format!("{c}:2:HIT"), format!("{c}-3-b"), format!("{c}:4:HIT"),
            format!("{c}-5-c"),
        ];
        assert_eq!(grep.lines(), right, "{}", grep.describe());
        assert_eq!(grep.number("matchCount"), 2, "{}", grep.describe());
        let count = daemon.call("grep", json!({ "pattern": "HIT", "mode": "count" })).await;
        assert_eq!(count.lines(), [format!("{c}:2")], "{}", count.describe());
        assert_eq!(count.number("matchCount"), 2, "{}", count.describe());
    }

    async fn c139_fifo_or_socket_in_the_tree(who) {
        let daemon = Daemon::start(who).await;
        let make = "mkfifo pipe; python3 -c 'import socket; s=socket.socket(socket.AF_UNIX); \
                    s.bind(\"sock\")'; echo needle > a.txt";
        daemon.shell(make).await.expect(0, "");
        let grep = daemon.grep("needle").await;
        expect_lines(grep.expect_within(3.0), &["/workspace/a.txt:1:needle"]);
        for path in ["pipe", "sock"] {
            let named = within_path(&daemon, "needle", path).await;
            named.expect_within(3.0);
            if named.is_error {
                named.err();
            } else {
                expect_lines(&named, &[]);
            }
        }
    }

    async fn c140_type_filters(who) {
        let daemon = Daemon::start(who).await;
        let make = "echo needle > a.tsx; echo needle > b.py; echo needle > c.ts";
        daemon.shell(make).await.expect(0, "");
        let typed = async |name: &str| {
            daemon.call("grep", json!({ "pattern": "needle", "type": name })).await
        };
        let tsx = typed("tsx").await;
        if tsx.is_error {
            tsx.err_with("tsx");
        } else {
            expect_lines(&tsx, &["/workspace/a.tsx:1:needle"]);
        }
        let ts = typed("ts").await;
        let lines = ts.lines();
        assert!(lines.contains(&"/workspace/c.ts:1:needle"), "{}", ts.describe());
        assert!(!lines.contains(&"/workspace/b.py:1:needle"), "{}", ts.describe());
        expect_lines(&typed("py").await, &["/workspace/b.py:1:needle"]);
        let unknown = typed("nosuch").await.err_with("nosuch");
        assert!(!unknown.message.contains(NOTHING), "{unknown:?}");
        // Near names, where there are some.
        let near = typed("pyhton").await.err();
        let said = [near.message.as_str(), &near.hint].concat();
        assert!(said.contains("py"), "{near:?}");
        assert!(said.contains("python") || said.contains("\"py\""), "{near:?}");
    }

    async fn c142_search_does_not_walk_out(who) {
        let daemon = Daemon::start(who).await;
        fs::write(daemon.outside.join("secret.txt"), "TOPSECRET x\n").expect("a file");
        let outside = daemon.outside.display();
        let make = format!("ln -s {outside}/secret.txt notes.txt; ln -s {outside} dir");
        daemon.shell(&make).await.expect(0, "");
        let all = daemon.grep("TOPSECRET").await;
        expect_lines(&all, &[]);
        for path in ["notes.txt", "dir", "dir/secret.txt"] {
            let grep = within_path(&daemon, "TOPSECRET", path).await;
            let said = grep.json.to_string();
            assert!(!said.contains("TOPSECRET x"), "{path}: {}", grep.describe());
            if !grep.is_error {
                expect_lines(&grep, &[]);
            }
        }
    }

    async fn c145_empty_pattern_and_matches_everything(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("seq 1 100000 > s.txt").await.expect(0, "");
        let empty = daemon.grep("").await.err();
        assert!(empty.message.contains("pattern"), "{empty:?}");
        for pattern in [".*", "^"] {
            let grep = daemon.grep(pattern).await;
            grep.expect_within(5.0).ok();
            assert!(grep.flag("truncated"), "{}", grep.describe());
            assert_eq!((grep.number("matchCount"), grep.lines().len()), (100, 100));
            assert!(grep.json.to_string().len() < 51_200 + 2048, "{}", grep.describe());
        }
    }

    async fn c146_encodings_other_than_utf8(who) {
        let daemon = Daemon::start(who).await;
        let make = "printf 'caf\\xe9 needle\\n' > l1.txt; \
                    printf '\\xff\\xfen\\0e\\0e\\0d\\0l\\0e\\0\\n\\0' > u16.txt";
        daemon.shell(make).await.expect(0, "");
        let grep = daemon.grep("needle").await;
        let lossy = "/workspace/l1.txt:1:caf\u{fffd} needle";
        assert!(grep.lines().contains(&lossy), "{}", grep.describe());
        let note = grep.text("note");
        assert!(note.contains("UTF-8") || note.contains("lossy"), "it is marked: {note}");
        let hit = grep.lines().contains(&"/workspace/u16.txt:1:needle");
        assert!(hit || note.contains("/workspace/u16.txt"), "{}", grep.describe());
    }
}
