//! The cases of the area `write`. The cell's user is never root, also under a daemon of root, so
//! the cases about modes mean the same for both.
#![forbid(unsafe_code)]

use std::fs;
use std::path::Path;

use cofferdam_e2e::{Daemon, Options, both, call_tool, tools_of, unique};
use cofferdam_proto::v1;
use cofferdam_proto::v1::filesystem_service_client::FilesystemServiceClient;
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::task::JoinSet;
use tonic::transport::Channel;

/// The refusal of a file that was not read.
fn unread(path: &str) -> String {
    format!("You must read file {path} before overwriting it. Use the read_file tool first.")
}

/// The refusal of a file that is another by now.
fn stale(path: &str) -> String {
    format!(
        "File {path} has been modified since it was last read. \
         Please read the file again before modifying it."
    )
}

/// The names in a directory of the host.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).expect("it can be listed").flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The bytes of a file as FilesystemService.Read streams them.
async fn bytes(files: &mut FilesystemServiceClient<Channel>, path: &str) -> Vec<u8> {
    let request = v1::ReadRequest { path: path.to_owned(), ..v1::ReadRequest::default() };
    let mut stream = files.read(request).await.expect("it is readable").into_inner();
    let mut bytes = Vec::new();
    while let Some(part) = stream.message().await.expect("the stream goes on") {
        if let Some(v1::read_response::Part::Chunk(chunk)) = part.part {
            bytes.extend_from_slice(&chunk.data);
        }
    }
    bytes
}

both! {
    async fn c079_mixed_endings_in_new_content(who) {
        let daemon = Daemon::start(who).await;
        let write = daemon.write("/workspace/m.bin.txt", "a\r\nb\nc\rd\r\r\ne").await;
        assert!(!write.ok().flag("existed"));
        assert_eq!(write.text("path"), "/workspace/m.bin.txt");
        let right = " 61 0d 0a 62 0a 63 0d 64 0d 0d 0a 65\n";
        daemon.shell("od -An -tx1 m.bin.txt").await.expect(0, right);
    }

    async fn c080_bom_on_overwrite(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("printf '\\xef\\xbb\\xbfold\\n' > b.txt").await.expect(0, "");
        daemon.read("/workspace/b.txt").await.expect_content("1: old");
        let write = daemon.write("/workspace/b.txt", "new\n").await;
        let dump = daemon.shell("od -An -tx1 b.txt").await;
        if dump.text("stdout") == " 6e 65 77 0a\n" {
            let note = write.ok().text("note");
            assert!(note.contains("BOM") || note.contains("byte order mark"), "{note}");
        } else {
            dump.expect(0, " ef bb bf 6e 65 77 0a\n");
        }
        daemon.read("/workspace/b.txt").await.expect_content("1: new");
        daemon.write("/workspace/b.txt", "\u{feff}new2\n").await.ok();
        daemon.shell("od -An -tx1 b.txt").await.expect(0, " ef bb bf 6e 65 77 32 0a\n");
    }

    async fn c082_symlink_inside_the_workspace(who) {
        let daemon = Daemon::start(who).await;
        let make = "mkdir t; echo old > t/real; ln -s t/real link; ln -s link link2";
        daemon.shell(make).await.expect(0, "");
        daemon.read("/workspace/link2").await.expect_content("1: old");
        let write = daemon.write("/workspace/link2", "new\n").await;
        assert!(write.ok().flag("existed"));
        let look = "readlink link link2; cat t/real";
        daemon.shell(look).await.expect(0, "t/real\nlink\nnew\n");
    }

    async fn c083_symlink_cycle(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("ln -s b a; ln -s a b; ln -s . self").await.expect(0, "");
        daemon.read("/workspace/a").await.expect_within(3.0).err();
        daemon.write("/workspace/a", "x").await.expect_within(3.0).err();
        daemon.read("/workspace/self/self/self/nope").await.expect_within(3.0).err();
        daemon.glob("**/*").await.expect_within(3.0).ok();
        daemon.grep("x").await.expect_within(3.0).ok();
        daemon.shell("readlink a b self; ls -A | wc -l").await.expect(0, "b\na\n.\n3\n");
    }

    async fn c085_parents_only_after_the_path_check(who) {
        let daemon = Daemon::start(who).await;
        daemon.write("/workspace/x/y/z.txt", "ok").await.ok();
        daemon.shell("cat x/y/z.txt").await.expect(0, "ok");
        daemon.shell(&format!("ln -s {} out", daemon.outside.display())).await.expect(0, "");
        for path in ["../evil1/a.txt", "/workspace/../evil1/a.txt", "/workspace/out/evil2/a.txt", "/evil3/a.txt"] {
            daemon.write(path, "x").await.err();
        }
        assert!(names(&daemon.outside).is_empty(), "{:?}", names(&daemon.outside));
        for directory in [daemon.directory(), daemon.workspace.as_path(), Path::new("/")] {
            let evil = names(directory).into_iter().find(|name| name.starts_with("evil"));
            assert_eq!(evil, None, "{}", directory.display());
        }
        daemon.shell("ls -d /evil* ../evil* out/evil* 2>/dev/null | wc -l").await.expect(0, "0\n");
    }

    async fn c086_directory_or_bad_component(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("mkdir d; echo keep > d/k; echo f > f").await.expect(0, "");
        for name in ["d", "d/", "f/x", "", ".", "..", "x/", &*"n".repeat(300)] {
            daemon.write(name, "x").await.err();
            daemon.write(&format!("/workspace/{name}"), "x").await.err();
        }
        daemon.shell("cat d/k f; ls -A . d").await.expect(0, "keep\nf\n.:\nd\nf\n\nd:\nk\n");
        daemon.write("/workspace/next", "x").await.ok();
    }

    async fn c088_bind_mounted_single_file(who) {
        let bound_files = vec![("conf.txt", "old\n")];
        let daemon = Daemon::start_with(who, Options { bound_files, ..Options::default() }).await;
        daemon.read("/workspace/conf.txt").await.expect_content("1: old");
        let write = daemon.write("/workspace/conf.txt", "new\n").await;
        assert!(write.ok().flag("existed"));
        // `grep -c` counts nothing and says so in its exit code.
        daemon.shell("cat conf.txt; ls -A | grep -c tmp").await.expect(1, "new\n0\n");
        daemon.shell("ls -A").await.expect(0, "conf.txt\n");
        let backing = daemon.directory().join("backing");
        assert_eq!(fs::read_to_string(backing.join("conf.txt")).expect("it is there"), "new\n");
        assert_eq!(names(&backing), ["conf.txt"]);
    }

    async fn c089_directory_not_writable(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("mkdir rd; echo old > rd/f; chmod 555 rd").await.expect(0, "");
        // Positive control: nothing can be made there.
        let new = daemon.write("/workspace/rd/new", "x").await.err();
        assert!(new.message.contains("/workspace/rd"), "{new:?}");
        daemon.read("/workspace/rd/f").await.expect_content("1: old");
        daemon.write("/workspace/rd/f", "new\n").await.ok();
        daemon.shell("cat rd/f; ls -A rd").await.expect(0, "new\nf\n");
    }

    async fn c091_disk_full(who) {
        let options = Options { workspace_tmpfs: Some("1m"), ..Options::default() };
        let daemon = Daemon::start_with(who, options).await;
        let make = "head -c 600000 /dev/zero | tr '\\0' o > f";
        daemon.shell(make).await.expect(0, "");
        daemon.read("/workspace/f").await.ok();
        let error = daemon.write("/workspace/f", &"n".repeat(1_200_000)).await.err();
        assert!(error.message.to_lowercase().contains("space"), "{error:?}");
        daemon.shell("tr -d o < f | wc -c; wc -c < f; ls -A").await.expect(0, "0\n600000\nf\n");
        daemon.read("/workspace/f").await.ok();
        daemon.write("/workspace/small", "ok").await.ok();
        daemon.shell("cat small").await.expect(0, "ok");
    }

    async fn c092_empty_and_missing_content(who) {
        let daemon = Daemon::start(who).await;
        daemon.write("/workspace/e.txt", "").await.ok();
        daemon.shell("echo keep > k; wc -c < e.txt").await.expect(0, "0\n");
        daemon.read("/workspace/k").await.expect_content("1: keep");
        let k = "/workspace/k";
        daemon.call("write_file", json!({ "filePath": k })).await.err_with("content");
        daemon.call("write_file", json!({ "filePath": k, "content": null })).await.err();
        let five = daemon.call("write_file", json!({ "filePath": k, "content": 5 })).await;
        let held = if five.is_error {
            five.err();
            "keep\n"
        } else {
            "5"
        };
        daemon.shell("cat k").await.expect(0, held);
        let emptied = daemon.write(k, "").await;
        let note = emptied.ok().text("note");
        assert!(note.contains("empty"), "{note}");
        assert!(note.contains(&held.len().to_string()), "the old size is named: {note}");
        daemon.shell("wc -c < k").await.expect(0, "0\n");
    }

    async fn c094_escapes_and_markup(who) {
        let daemon = Daemon::start(who).await;
        let line = "\\uE010 \\n \\t \\\\ &lt;div&gt; &amp; ${x} $(id) `id` %s %% \"q\" 'q' \
                    C:\\new\\table ]]> EOF é 😀 \u{1b} \u{2028}";
        for (name, text) in [("v.txt", line), ("eof.txt", "EOF\n'EOF'\nE_O_F\n")] {
            daemon.write(&format!("/workspace/{name}"), text).await.ok();
            let digest: String =
                Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect();
            let sum = daemon.shell(&format!("sha256sum {name}")).await;
            sum.expect(0, &format!("{digest}  {name}\n"));
        }
    }

    async fn c095_final_newline(who) {
        let daemon = Daemon::start(who).await;
        for (name, text) in [("t0", "a"), ("t1", "a\n"), ("t2", "a\n\n")] {
            daemon.write(&format!("/workspace/{name}"), text).await.ok();
        }
        daemon.shell("wc -c < t0; wc -c < t1; wc -c < t2").await.expect(0, "1\n2\n3\n");
    }

    async fn c097_fifo_socket_or_device(who) {
        let daemon = Daemon::start(who).await;
        let make = "mkfifo p; python3 -c 'import socket; \
                    s=socket.socket(socket.AF_UNIX); s.bind(\"sock\")'";
        daemon.shell(make).await.expect(0, "");
        for (path, kind) in
            [("/workspace/p", "FIFO"), ("/workspace/sock", "socket"), ("/dev/full", "device")]
        {
            daemon.write(path, "x").await.expect_within(2.0).err_with(kind);
        }
        daemon.shell("stat -c %F p sock").await.expect(0, "fifo\nsocket\n");
    }

    async fn c098_unread_existing_file(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("echo user > u.txt").await.expect(0, "");
        let refused = daemon.write("/workspace/u.txt", "x").await.err();
        assert_eq!(refused.message, unread("/workspace/u.txt"));
        let created = daemon.write("/workspace/brand/new.txt", "x").await;
        assert!(!created.ok().flag("existed"));
        daemon.shell("cat u.txt").await.expect(0, "user\n");
    }

    async fn c100_only_the_time_changed(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("echo a > t.txt").await.expect(0, "");
        daemon.read("/workspace/t.txt").await.expect_content("1: a");
        daemon.shell("sleep 1; touch t.txt").await.expect(0, "");
        daemon.write("/workspace/t.txt", "b\n").await.ok();
        daemon.read("/workspace/t.txt").await.expect_content("1: b");
        daemon.shell("cp t.txt t2; mv t2 t.txt").await.expect(0, "");
        daemon.write("/workspace/t.txt", "c\n").await.ok();
        daemon.shell("cat t.txt").await.expect(0, "c\n");
    }

    async fn c101_same_size_and_time_other_content(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("echo aaa > q.txt; touch -d @1000000000 q.txt").await.expect(0, "");
        daemon.read("/workspace/q.txt").await.expect_content("1: aaa");
        daemon.shell("echo bbb > q.txt; touch -d @1000000000 q.txt").await.expect(0, "");
        let refused = daemon.write("/workspace/q.txt", "ccc\n").await.err();
        assert_eq!(refused.message, stale("/workspace/q.txt"));
        daemon.shell("cat q.txt").await.expect(0, "bbb\n");
    }

    async fn c103_writing_again_after_ones_own_write(who) {
        let daemon = Daemon::start(who).await;
        for (text, existed) in [("1\n", false), ("2\n", true), ("3\n", true)] {
            let write = daemon.write("/workspace/o.txt", text).await;
            assert_eq!(write.ok().flag("existed"), existed, "{text}");
        }
        daemon.shell("cat o.txt").await.expect(0, "3\n");
    }

    async fn c104_partial_read_then_overwrite(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("seq 1 3000 > p.txt").await.expect(0, "");
        let page = |offset: u64, limit: u64| {
            json!({ "filePath": "/workspace/p.txt", "offset": offset, "limit": limit })
        };
        daemon.call("read_file", page(1, 10)).await.ok();
        let refused = daemon.write("/workspace/p.txt", "x\n").await.err();
        let right = "You have read only lines 1-10 of 3000 of file /workspace/p.txt. \
                     Read the rest before overwriting it, or use edit_file.";
        assert_eq!(refused.message, right);
        daemon.shell("wc -l < p.txt").await.expect(0, "3000\n");
        for offset in [1, 1501] {
            let read = daemon.call("read_file", page(offset, 1500)).await;
            assert_eq!(read.lines().len(), 1500, "{}", read.describe());
        }
        daemon.write("/workspace/p.txt", "x\n").await.ok();
        daemon.shell("cat p.txt").await.expect(0, "x\n");
    }

    async fn c106_grep_is_not_a_full_read(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("seq 1 50 > g.txt").await.expect(0, "");
        for (pattern, matches) in [("zzz", 0), ("^7$", 1), (".", 50)] {
            let input = json!({ "pattern": pattern, "path": "/workspace/g.txt" });
            let grep = daemon.call("grep", input).await;
            assert_eq!(grep.ok().number("matchCount"), matches, "{}", grep.describe());
            daemon.glob("g.txt").await.expect_paths(&["/workspace/g.txt"]);
            let refused = daemon.write("/workspace/g.txt", "x").await.err();
            assert_eq!(refused.message, unread("/workspace/g.txt"));
        }
        daemon.shell("wc -l < g.txt").await.expect(0, "50\n");
    }

    async fn c107_deleted_or_made_again_after_the_read(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("echo 1 > d.txt").await.expect(0, "");
        daemon.read("/workspace/d.txt").await.expect_content("1: 1");
        daemon.shell("rm d.txt").await.expect(0, "");
        let write = daemon.write("/workspace/d.txt", "2\n").await;
        if write.is_error {
            assert!(write.err().message.contains("/workspace/d.txt"), "{}", write.describe());
            daemon.shell("ls d.txt 2>/dev/null | wc -l").await.expect(0, "0\n");
        } else {
            assert!(!write.ok().flag("existed"), "{}", write.describe());
            daemon.shell("cat d.txt").await.expect(0, "2\n");
        }
        daemon.shell("echo 1 > e.txt").await.expect(0, "");
        daemon.read("/workspace/e.txt").await.expect_content("1: 1");
        daemon.shell("rm e.txt; echo other > e.txt").await.expect(0, "");
        let refused = daemon.write("/workspace/e.txt", "2\n").await.err();
        assert_eq!(refused.message, stale("/workspace/e.txt"));
        daemon.shell("cat e.txt").await.expect(0, "other\n");
    }

    async fn c109_many_writers_from_several_sessions(who) {
        const SIZE: usize = 65536;
        let daemon = Daemon::start(who).await;
        daemon.write("/workspace/s.txt", &"x".repeat(SIZE)).await.ok();
        let mut writers = JoinSet::new();
        for letter in ["a", "b", "c", "d", "e", "f", "g", "h"] {
            let (mut tools, session) = (tools_of(daemon.new_channel()), unique());
            writers.spawn(async move {
                let read = json!({ "filePath": "/workspace/s.txt" }).to_string();
                let write = json!({ "filePath": "/workspace/s.txt", "content": letter.repeat(SIZE) });
                let mut written = 0;
                for _ in 0..50 {
                    let write = write.to_string();
                    let reply = call_tool(&mut tools, &session, "write_file", write).await;
                    if reply.expect("it answers").is_error {
                        let reply = call_tool(&mut tools, &session, "read_file", read.clone()).await;
                        one_letter(reply.expect("it answers").ok().text("content"));
                    } else {
                        written += 1;
                    }
                }
                written
            });
        }
        let mut files = FilesystemServiceClient::new(daemon.new_channel());
        let mut written = 0;
        while !writers.is_empty() {
            let text = bytes(&mut files, "/workspace/s.txt").await;
            assert_eq!(text.len(), SIZE);
            assert!(text.iter().all(|byte| *byte == text[0]), "a torn file was read");
            let read = daemon.read("/workspace/s.txt").await;
            one_letter(read.ok().text("content"));
            while let Some(ended) = writers.try_join_next() {
                written += ended.expect("no writer panicked");
            }
        }
        assert!(written >= 8, "{written} writes of 400");
        assert_eq!(names(&daemon.workspace), ["s.txt"]);
        let end = fs::read(daemon.workspace.join("s.txt")).expect("it is there");
        assert!(end.len() == SIZE && end.iter().all(|byte| *byte == end[0]), "a torn file");
    }
}

/// Asserts that a read shows a line of one letter.
#[track_caller]
fn one_letter(content: &str) {
    let line = content.strip_prefix("1: ").and_then(|line| line.strip_suffix(" [truncated]"));
    let line = line.unwrap_or_else(|| panic!("one long line: {content}"));
    assert!(line.len() == 2000 && line.bytes().all(|byte| byte == line.as_bytes()[0]), "{content}");
}
