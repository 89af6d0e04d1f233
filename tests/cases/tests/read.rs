//! The cases of the area `read`.
#![forbid(unsafe_code)]

use std::fs;
use std::time::Duration;

use cofferdam_e2e::{Daemon, Options, both, resident_bytes};
use serde_json::{Value, json};

/// A page of a file, as `read_file` takes it.
fn page(path: &str, offset: Value, limit: Value) -> Value {
    json!({ "filePath": path, "offset": offset, "limit": limit })
}

both! {
    async fn c050_crlf_text(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("printf 'a\\r\\nb\\r\\nc' > crlf.txt").await.expect(0, "");
        let whole = daemon.read("/workspace/crlf.txt").await;
        whole.expect_content("1: a\r\n2: b\r\n3: c");
        assert_eq!((whole.number("totalLines"), whole.flag("truncated")), (3, false));
        assert!(whole.text("lineEndings").to_lowercase().contains("crlf"), "{}", whole.describe());
        let input = page("/workspace/crlf.txt", json!(2), json!(1));
        let second = daemon.call("read_file", input).await;
        second.expect_content("2: b\r");
        assert_eq!((second.number("totalLines"), second.number("nextOffset")), (3, 3));
    }

    async fn c052_utf16_file(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("printf '\\xff\\xfeh\\0i\\0\\n\\0' > u16.txt").await.expect(0, "");
        let read = daemon.read("/workspace/u16.txt").await;
        read.expect_content("1: hi");
        assert!(read.text("encoding").contains("16"), "{}", read.describe());
        let input = json!({ "pattern": "hi", "path": "/workspace/u16.txt" });
        let grep = daemon.call("grep", input).await;
        assert_eq!(grep.lines(), ["/workspace/u16.txt:1:hi"], "{}", grep.describe());
        assert_eq!(grep.number("matchCount"), 1);
        // What was decoded cannot be written back as it was.
        daemon.write("/workspace/u16.txt", "hi\n").await.err();
        daemon.shell("od -An -tx1 u16.txt").await.expect(0, " ff fe 68 00 69 00 0a 00\n");
    }

    async fn c053_legacy_8_bit_encoding(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("printf 'caf\\xe9 \\xb0\\xa1 ok\\n' > l1.txt").await.expect(0, "");
        let read = daemon.read("/workspace/l1.txt").await;
        read.expect_content("1: caf\u{fffd} \u{fffd}\u{fffd} ok");
        assert!(read.flag("lossy"), "{}", read.describe());
        let shown = "caf\u{fffd} \u{fffd}\u{fffd} ok\n";
        let refused = daemon.write("/workspace/l1.txt", shown).await.err();
        assert!(refused.message.contains("UTF-8"), "{refused:?}");
        daemon.shell("od -An -tx1 l1.txt").await.expect(0, " 63 61 66 e9 20 b0 a1 20 6f 6b 0a\n");
    }

    async fn c055_one_huge_line_among_normal_ones(who) {
        let daemon = Daemon::start(who).await;
        let make = "{ echo head; head -c 1000000 /dev/zero | tr '\\0' y; echo; echo tail; } > mix.txt";
        daemon.shell(make).await.expect(0, "");
        let read = daemon.read("/workspace/mix.txt").await;
        let huge = "y".repeat(2000);
        read.expect_content(&format!("1: head\n2: {huge} [truncated]\n3: tail"));
        assert_eq!((read.flag("truncated"), read.number("totalLines")), (true, 3));
        assert_eq!(read.number_if_any("nextOffset"), None, "no line remains");
    }

    async fn c056_offset_beyond_the_end(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("printf 'a\\nb\\nc\\n' > t3.txt; : > none.txt").await.expect(0, "");
        for offset in [4, 100] {
            let input = json!({ "filePath": "/workspace/t3.txt", "offset": offset });
            let error = daemon.call("read_file", input).await.err();
            let right = format!("offset {offset} is past the end of the file (3 lines).");
            assert_eq!(error.message, right);
            assert!(!error.hint.contains("empty"), "{error:?}");
        }
        let input = json!({ "filePath": "/workspace/none.txt", "offset": 4 });
        let empty = daemon.call("read_file", input).await.err();
        let right = "offset 4 is past the end of the file (0 lines). \
                     Use the default offset to read an empty file.";
        assert_eq!(empty.message, right);
    }

    async fn c058_empty_file(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell(": > empty.py").await.expect(0, "");
        let read = daemon.read("/workspace/empty.py").await;
        read.expect_content("");
        assert_eq!((read.number("totalLines"), read.flag("truncated")), (0, false));
        assert_eq!(read.text("note"), "file is empty");
        let write = daemon.write("/workspace/empty.py", "x\n").await;
        assert!(write.ok().flag("existed"));
        daemon.shell("cat empty.py").await.expect(0, "x\n");
    }

    async fn c059_more_lines_flag_at_the_borders(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("seq 1 10 > ten").await.expect(0, "");
        let numbered = |first: u64, last: u64| {
            (first..=last).map(|n| format!("{n}: {n}")).collect::<Vec<_>>().join("\n")
        };
        for (offset, limit, last, next) in
            [(8, 3, 10, None), (1, 10, 10, None), (1, 3, 3, Some(4)), (8, 2, 9, Some(10))]
        {
            let input = page("/workspace/ten", json!(offset), json!(limit));
            let read = daemon.call("read_file", input).await;
            read.expect_content(&numbered(offset, last));
            assert_eq!(read.flag("truncated"), next.is_some(), "{}", read.describe());
            assert_eq!(read.number_if_any("nextOffset"), next, "{}", read.describe());
            assert_eq!(read.number("totalLines"), 10);
        }
    }

    async fn c061_fifo(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("mkfifo p; (echo data > p &)").await.expect(0, "");
        let read = daemon.read("/workspace/p").await;
        let error = read.expect_within(2.0).err();
        assert!(error.message.contains("FIFO"), "{error:?}");
        daemon.shell("timeout 3 cat p").await.expect(0, "data\n");
    }

    async fn c062_devices_proc_and_endless_files(who) {
        let env = vec![("CANARY_KEY".to_owned(), "s3cr3t".to_owned())];
        let daemon = Daemon::start_with(who, Options { env, ..Options::default() }).await;
        let environment = fs::read(format!("/proc/{}/environ", daemon.pid)).expect("it lives");
        let environment = String::from_utf8_lossy(&environment);
        assert!(environment.contains("s3cr3t"), "the daemon has the key: {environment}");
        let memory = || resident_bytes(daemon.pid) + resident_bytes(daemon.toolbox().pid);
        let before = memory();
        let devices = ["/dev/zero", "/dev/random", "/dev/stdin", "/dev/tty"];
        let proc = ["/proc/self/environ", "/proc/self/mem", "/proc/1/environ"];
        for path in devices.iter().chain(&proc) {
            let read = daemon.read(path).await;
            read.expect_within(2.0);
            assert!(!read.json.to_string().contains("s3cr3t"), "{path}: {}", read.describe());
            if devices.contains(path) {
                read.err();
            }
        }
        let grown = memory().saturating_sub(before);
        assert!(grown < 32 << 20, "{grown} bytes more");
        let own = daemon.shell("cat /proc/self/environ /proc/1/environ 2>/dev/null | tr '\\0' ' '");
        assert!(!own.await.json.to_string().contains("s3cr3t"));
    }

    async fn c064_multi_gigabyte_file(who) {
        let daemon = Daemon::start(who).await;
        daemon.put_text("big.log", "one\ntwo\n");
        let big = fs::File::options().write(true).open(daemon.workspace.join("big.log"));
        big.expect("it is there").set_len(8 << 30).expect("it can be sparse");
        let memory = || resident_bytes(daemon.pid) + resident_bytes(daemon.toolbox().pid);
        let before = memory();
        let input = json!({ "filePath": "/workspace/big.log", "limit": 2 });
        let read = daemon.call("read_file", input).await;
        read.expect_within(5.0);
        let grown = memory().saturating_sub(before);
        assert!(grown < 100 << 20, "{grown} bytes more");
        if read.is_error {
            let error = read.err();
            let why = error.message.to_lowercase();
            assert!(why.contains("binary") || why.contains("large"), "{error:?}");
            assert!(!error.hint.is_empty(), "{error:?}");
        } else {
            read.expect_content("1: one\n2: two");
            assert_eq!((read.flag("truncated"), read.number("nextOffset")), (true, 3));
            assert_eq!(read.number_if_any("totalLines"), None, "it was not counted");
        }
    }

    async fn c065_look_alike_spaces(who) {
        let daemon = Daemon::start(who).await;
        let make = "printf A > 'x y.txt'; printf B > $'x\\u00a0y.txt'; printf C > $'x\\u202fy.txt'";
        daemon.shell(make).await.expect(0, "");
        let (plain, hard, narrow) =
            ("/workspace/x y.txt", "/workspace/x\u{a0}y.txt", "/workspace/x\u{202f}y.txt");
        for (path, content) in [(plain, "1: A"), (hard, "1: B"), (narrow, "1: C")] {
            daemon.read(path).await.expect_content(content);
        }
        daemon.shell("rm $'x\\u202fy.txt'").await.expect(0, "");
        let missing = daemon.read(narrow).await.err_with("File not found: ");
        assert!(missing.message.contains(narrow), "{missing:?}");
        let write = daemon.write(narrow, "D").await;
        assert!(!write.ok().flag("existed"));
        let look = "ls | wc -l; cat 'x y.txt' $'x\\u00a0y.txt' $'x\\u202fy.txt'";
        daemon.shell(look).await.expect(0, "3\nABD");
    }

    async fn c067_names_that_are_not_utf8(who) {
        let daemon = Daemon::start(who).await;
        let make = "printf needle > $'bad\\xff.txt'; printf needle > good.txt";
        daemon.shell(make).await.expect(0, "");
        let glob = daemon.glob("*.txt").await;
        assert!(glob.lines().contains(&"/workspace/good.txt"), "{}", glob.describe());
        let odd = "/workspace/bad\\xff.txt";
        let shown = glob.lines().contains(&odd);
        assert!(shown || glob.skipped("non_utf8_name") == 1, "{}", glob.describe());
        let grep = daemon.grep("needle").await;
        assert!(grep.lines().contains(&"/workspace/good.txt:1:needle"), "{}", grep.describe());
        let shown = grep.lines().contains(&"/workspace/bad\\xff.txt:1:needle");
        assert!(shown || grep.skipped("non_utf8_name") == 1, "{}", grep.describe());
    }

    async fn c068_odd_names(who) {
        let daemon = Daemon::start(who).await;
        let make = "for n in ' lead' 'trail ' $'new\\nline' '-n' '--help' 'a\"b' \"a'b\" '~' \
                    '$HOME' 'a\\b' '*' '#x' ; do printf '%s' \"$n\" > \"./$n\"; done";
        daemon.shell(make).await.expect(0, "");
        let names = [
            " lead", "trail ", "new\nline", "-n", "--help", "a\"b", "a'b", "~", "$HOME", "a\\b",
            "*", "#x",
        ];
        for name in names {
            let numbered: Vec<String> =
                name.lines().enumerate().map(|(i, line)| format!("{}: {line}", i + 1)).collect();
            let read = daemon.read(&format!("/workspace/{name}")).await;
            read.expect_content(&numbered.join("\n"));
        }
        let glob = daemon.glob("*").await;
        let lines = glob.lines();
        assert_eq!((glob.number("count"), lines.len()), (12, 12), "{}", glob.describe());
        for name in names.iter().filter(|name| !name.contains(['\n', '\\'])) {
            assert!(lines.contains(&format!("/workspace/{name}").as_str()), "{name}: {lines:?}");
        }
        let escaped = |line: &&&str| line.starts_with("/workspace/new") && line.ends_with("line");
        assert_eq!(lines.iter().filter(escaped).count(), 1, "{lines:?}");
        let backslash = |line: &&&str| ["/workspace/a\\b", "/workspace/a\\\\b"].contains(*line);
        assert_eq!(lines.iter().filter(backslash).count(), 1, "{lines:?}");
    }

    async fn c070_notebook_with_large_outputs(who) {
        let daemon = Daemon::start(who).await;
        let make = r#"python3 - <<'E'
import json
json.dump({"nbformat":4,"nbformat_minor":5,"metadata":{},"cells":[{"cell_type":"code","metadata":{},"execution_count":1,"source":["print(1)\n"],"outputs":[{"output_type":"stream","name":"stdout","text":["LOSS=0.5\n"]},{"output_type":"display_data","metadata":{},"data":{"image/png":"A"*500000}}]}]},open("n.ipynb","w"),indent=1)
E"#;
        daemon.shell(make).await.expect(0, "");
        let read = daemon.read("/workspace/n.ipynb").await;
        let content = read.ok().text("content");
        assert!(content.contains("print(1)") && content.contains("LOSS=0.5"), "{content}");
        assert!(content.len() <= 51_200, "{}", content.len());
        assert!(content.contains(" [truncated]\n") && read.flag("truncated"), "{content}");
    }

    async fn c071_symlinks_that_lead_out(who) {
        let daemon = Daemon::start(who).await;
        fs::write(daemon.outside.join("secret.txt"), "TOPSECRET").expect("a file");
        let outside = daemon.outside.display();
        let make = format!(
            "ln -s {outside}/secret.txt l1; ln -s {outside} l2; ln -s {outside}/new.txt l3; ln -s l2 l4"
        );
        daemon.shell(&make).await.expect(0, "");
        let mut replies = Vec::new();
        for path in ["l1", "l2/secret.txt", "l4/secret.txt"] {
            let read = daemon.read(&format!("/workspace/{path}")).await;
            read.err();
            replies.push(read);
        }
        for path in ["l3", "l2/x.txt"] {
            replies.push(daemon.write(&format!("/workspace/{path}"), "x").await);
        }
        replies.push(daemon.grep("TOPSECRET").await);
        assert_eq!(replies[5].ok().number("matchCount"), 0, "{}", replies[5].describe());
        for pattern in ["l2/*", "**/secret.txt"] {
            let glob = daemon.glob(pattern).await;
            assert!(!glob.json.to_string().contains("/secret.txt\""), "{}", glob.describe());
            replies.push(glob);
        }
        for reply in &replies[..5] {
            assert!(!reply.json.to_string().contains("TOPSECRET"), "{}", reply.describe());
        }
        for reply in &replies[6..] {
            assert!(!reply.json.to_string().contains("TOPSECRET"), "{}", reply.describe());
        }
        let names: Vec<_> = fs::read_dir(&daemon.outside)
            .expect("it is there").flatten().map(|entry| entry.file_name()).collect();
        assert_eq!(names, ["secret.txt"]);
        let secret = fs::read_to_string(daemon.outside.join("secret.txt")).expect("it is there");
        assert_eq!(secret, "TOPSECRET");
    }

    async fn c073_line_numbers_agree(who) {
        let daemon = Daemon::start(who).await;
        let make = "printf 'a\\fb\\nc\\xe2\\x80\\xa8d\\xc2\\x85e\\nf\\rg\\vh\\nTARGET\\n' > odd.txt; \
                    grep -n TARGET odd.txt";
        daemon.shell(make).await.expect(0, "4:TARGET\n");
        let grep = daemon.grep("TARGET").await;
        assert_eq!(grep.lines(), ["/workspace/odd.txt:4:TARGET"], "{}", grep.describe());
        let input = page("/workspace/odd.txt", json!(4), json!(1));
        let read = daemon.call("read_file", input).await;
        read.expect_content("4: TARGET");
        assert_eq!((read.number("totalLines"), read.flag("truncated")), (4, false));
    }

    async fn c074_line_prefix_and_leading_tabs(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("printf '\\tx\\nx\\n12\\tfoo\\n  \\ty\\n' > mk").await.expect(0, "");
        let read = daemon.read("/workspace/mk").await;
        read.expect_content("1: \tx\n2: x\n3: 12\tfoo\n4:   \ty");
    }

    async fn c076_absurd_offsets_and_limits(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("seq 1 5 > five").await.expect(0, "");
        let lines = ["1: 1", "2: 2", "3: 3", "4: 4", "5: 5"];
        let max = i64::MAX.to_string();
        for (offset, limit) in [
            ("0", "2"), ("-1", "2"), ("1", "0"), ("1", "-5"), (&*max, &*max),
            ("18446744073709551615", "1"), ("1.5", "2"), ("\"2\"", "\"1\""), ("2", "1e9"),
        ] {
            let input =
                format!(r#"{{"filePath":"/workspace/five","offset":{offset},"limit":{limit}}}"#);
            let read = daemon.call_text("test", "read_file", input).await;
            match (offset, limit) {
                ("0" | "-1", _) => {
                    let right = format!("offset must be >= 1. Received: {offset}.");
                    let error = read.err();
                    assert!(error.message.ends_with(&right), "{error:?}");
                }
                ("2", _) => {
                    read.expect_content(&lines[1..].join("\n"));
                    assert!(!read.flag("truncated"), "{}", read.describe());
                }
                _ if read.is_error => {
                    read.err();
                }
                _ => {
                    let shown = read.lines();
                    assert!(!shown.is_empty(), "{}", read.describe());
                    assert!(shown.iter().all(|line| lines.contains(line)), "{}", read.describe());
                }
            }
        }
        daemon.read("/workspace/five").await.expect_content(&lines.join("\n"));
        tokio::time::timeout(Duration::from_secs(5), daemon.workspace_info()).await.expect("it lives");
    }

    async fn c077_text_that_looks_like_an_error(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("echo 'Error: file not found' > e.log").await.expect(0, "");
        let read = daemon.read("/workspace/e.log").await;
        read.expect_content("1: Error: file not found");
        daemon.write("/workspace/e.log", "ok\n").await.ok();
        daemon.shell("echo 'Error: x'; exit 0").await.expect(0, "Error: x\n");
    }
}
