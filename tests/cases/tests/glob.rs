//! The cases of the area `glob`.
#![forbid(unsafe_code)]

use std::fs;

use cofferdam_e2e::{Daemon, ToolReply, both};
use serde_json::json;

/// What a search without results says to the model.
const NOTHING: &str = "No files found";

/// A glob below a directory of the workspace.
async fn below(daemon: &Daemon, pattern: &str, path: &str) -> ToolReply {
    let input = json!({ "pattern": pattern, "path": format!("/workspace/{path}") });
    daemon.call("glob", input).await
}

/// Asserts that a glob found nothing, said so, and that nobody can take it for a fault.
#[track_caller]
fn found_nothing(glob: &ToolReply) {
    assert_eq!(glob.ok().number("count"), 0, "{}", glob.describe());
    assert!(glob.text("content").starts_with(NOTHING), "{}", glob.describe());
    assert!(!glob.flag("truncated"), "{}", glob.describe());
}

both! {
    async fn c110_dot_directory_named_in_the_pattern(who) {
        let daemon = Daemon::start(who).await;
        let make = "mkdir -p .agent/skills .github/workflows; echo x > .agent/skills/a.md; \
                    echo x > .github/workflows/ci.yml; echo x > .env";
        daemon.shell(make).await.expect(0, "");
        let (skill, flow) = ("/workspace/.agent/skills/a.md", "/workspace/.github/workflows/ci.yml");
        daemon.glob(".agent/**/*.md").await.expect_paths(&[skill]);
        below(&daemon, "**/*.yml", ".github").await.expect_paths(&[flow]);
        daemon.glob(".env*").await.expect_paths(&["/workspace/.env"]);
        daemon.glob(".*/workflows/*").await.expect_paths(&[flow]);
    }

    async fn c112_brackets_and_parentheses_in_directories(who) {
        let daemon = Daemon::start(who).await;
        let make = "mkdir -p 'app/(shop)/[slug]' 'app/[...all]'; \
                    echo hi | tee 'app/(shop)/[slug]/page.tsx' > 'app/[...all]/page.tsx'";
        daemon.shell(make).await.expect(0, "");
        let slug = "/workspace/app/(shop)/[slug]/page.tsx";
        let all = "/workspace/app/[...all]/page.tsx";
        daemon.glob("app/**/page.tsx").await.expect_paths(&[slug, all]);
        daemon.glob("app/(shop)/*/page.tsx").await.expect_paths(&[slug]);
        below(&daemon, "page.tsx", "app/(shop)/[slug]").await.expect_paths(&[slug]);
        daemon.glob("app/(shop)/\\[slug\\]/*.tsx").await.expect_paths(&[slug]);
        daemon.read(slug).await.expect_content("1: hi");
        let input = json!({ "pattern": "hi", "path": "/workspace/app/[...all]" });
        let grep = daemon.call("grep", input).await;
        assert_eq!(grep.lines(), [format!("{all}:1:hi")], "{}", grep.describe());
        assert_eq!(grep.number("matchCount"), 1);
    }

    async fn c113_literal_path_as_the_pattern(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("touch 'a b.txt' '{x}.txt' '[id].ts' 'q?.md'").await.expect(0, "");
        daemon.glob("a b.txt").await.expect_paths(&["/workspace/a b.txt"]);
        daemon.glob("/workspace/a b.txt").await.expect_paths(&["/workspace/a b.txt"]);
        daemon.glob("q?.md").await.expect_paths(&["/workspace/q?.md"]);
        for name in ["{x}.txt", "[id].ts"] {
            let glob = daemon.glob(name).await;
            let hit = glob.lines().contains(&format!("/workspace/{name}").as_str());
            let hint = glob.text_or_empty("note");
            assert!(hit || hint.contains('\\'), "a hit, or how to escape: {}", glob.describe());
        }
    }

    async fn c115_two_stars_and_bare_names(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("mkdir -p a/b/c; touch x.md a/x.md a/b/c/x.md").await.expect(0, "");
        let (top, middle, deep) = ("/workspace/x.md", "/workspace/a/x.md", "/workspace/a/b/c/x.md");
        daemon.glob("**/x.md").await.expect_paths(&[top, middle, deep]);
        daemon.glob("a/**/x.md").await.expect_paths(&[middle, deep]);
        daemon.glob("a/**").await.expect_paths(&[middle, deep]);
        // Anchored at the directory, as the contract says.
        found_nothing(&daemon.glob("b/c/*.md").await);
        daemon.glob("*/x.md").await.expect_paths(&[middle]);
        daemon.glob("**").await.expect_paths(&[top, middle, deep]);
    }

    async fn c116_exactly_at_the_limit(who) {
        let daemon = Daemon::start(who).await;
        let make = "mkdir g1 g2 g3; (cd g1; seq -f f%05g 1 100 | xargs touch); \
                    (cd g2; seq -f f%05g 1 101 | xargs touch); (cd g3; seq -f f%05g 1 1001 | xargs touch)";
        daemon.shell(make).await.expect(0, "");
        let whole = below(&daemon, "*", "g1").await;
        assert_eq!((whole.ok().number("count"), whole.flag("truncated")), (100, false));
        assert_eq!(whole.lines().len(), 100);
        let cut = below(&daemon, "*", "g2").await;
        assert_eq!((cut.ok().number("count"), cut.flag("truncated")), (100, true));
        assert_eq!(cut.lines().len(), 100);
        let footer = "\n\n(Results truncated: showing first 100 results out of more. Use a more \
                      specific path or pattern to narrow results.)";
        assert!(cut.text("content").ends_with(footer), "{}", cut.describe());
        for (limit, count, truncated) in [(101, 101, false), (1000, 101, false), (1, 1, true)] {
            let input = json!({ "pattern": "*", "path": "/workspace/g2", "limit": limit });
            let glob = daemon.call("glob", input).await;
            assert_eq!(glob.ok().number("count"), count, "{}", glob.describe());
            assert_eq!(glob.flag("truncated"), truncated, "{}", glob.describe());
        }
        let input = json!({ "pattern": "*", "path": "/workspace/g3", "limit": 1000 });
        let most = daemon.call("glob", input).await;
        assert_eq!((most.ok().number("count"), most.flag("truncated")), (1000, true));
    }

    async fn c118_one_bad_entry(who) {
        let daemon = Daemon::start(who).await;
        let make = "mkdir ok bad; touch ok/a.txt bad/b.txt; ln -s nowhere dang.txt; chmod 000 bad";
        daemon.shell(make).await.expect(0, "");
        let glob = daemon.glob("**/*.txt").await;
        assert!(glob.lines().contains(&"/workspace/ok/a.txt"), "{}", glob.describe());
        assert_eq!(glob.skipped("unreadable"), 1, "{}", glob.describe());
        daemon.shell("chmod 755 bad").await.expect(0, "");
        // Positive control: it was the mode.
        let glob = daemon.glob("**/*.txt").await;
        assert!(glob.lines().contains(&"/workspace/bad/b.txt"), "{}", glob.describe());
        assert_eq!(glob.skipped("unreadable"), 0, "{}", glob.describe());
    }

    async fn c119_link_loops_and_deep_trees(who) {
        let daemon = Daemon::start(who).await;
        let make = "mkdir -p n/a n/b; ln -s ../.. n/a/up; ln -s ../a n/b/a; touch n/f.js; p=deep; \
                    for i in $(seq 150); do p=$p/d; done; mkdir -p $p; touch $p/end.js";
        daemon.shell(make).await.expect(0, "");
        let glob = daemon.glob("**/*.js").await;
        glob.expect_within(5.0);
        let end = format!("/workspace/deep{}/end.js", "/d".repeat(150));
        glob.expect_paths(&["/workspace/n/f.js", &end]);
    }

    async fn c121_absolute_patterns_and_dots(who) {
        let daemon = Daemon::start(who).await;
        for directory in [daemon.directory(), &daemon.outside] {
            fs::write(directory.join("HOSTONLY.txt"), "x").expect("a file");
        }
        daemon.shell("touch in.txt").await.expect(0, "");
        daemon.glob("/workspace/*.txt").await.expect_paths(&["/workspace/in.txt"]);
        let above = json!({ "pattern": "*", "path": "/workspace/.." });
        for glob in [
            daemon.glob("../*").await,
            daemon.glob("/**/HOSTONLY.txt").await,
            daemon.call("glob", above).await,
            daemon.glob("sub/../../*").await,
        ] {
            glob.expect_within(10.0);
            if glob.is_error {
                glob.err();
                continue;
            }
            let shown: Vec<&str> = glob.lines();
            assert!(!shown.iter().any(|line| line.ends_with("HOSTONLY.txt")), "{}", glob.describe());
        }
    }

    async fn c122_missing_base_or_a_file_as_base(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("touch f.txt").await.expect(0, "");
        let missing = below(&daemon, "*", "srcc").await.err_with("/workspace/srcc").message;
        let file = below(&daemon, "*", "f.txt").await;
        let said = if file.is_error {
            file.err_with("/workspace/f.txt").message
        } else {
            file.expect_paths(&["/workspace/f.txt"]).text("content").to_owned()
        };
        let none = daemon.glob("*.zzz").await;
        found_nothing(&none);
        assert_ne!(missing, said);
        assert!(!missing.contains(NOTHING) && !said.contains(NOTHING), "{missing} {said}");
    }

    async fn c124_negation(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("touch a.ts a.test.ts '!x'").await.expect(0, "");
        let (plain, test, odd) = ("/workspace/a.ts", "/workspace/a.test.ts", "/workspace/!x");
        let negated = daemon.glob("!*.test.ts").await;
        if negated.is_error {
            negated.err();
        } else {
            let lines = negated.lines();
            assert!(lines.contains(&plain) && !lines.contains(&test), "{}", negated.describe());
        }
        daemon.glob("*.ts").await.expect_paths(&[plain, test]);
        daemon.glob("[!a]*").await.expect_paths(&[odd]);
        daemon.glob("\\!x").await.expect_paths(&[odd]);
    }

    async fn c125_case(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("echo hit > readme.md; echo hit > README.MD").await.expect(0, "");
        daemon.glob("*.md").await.expect_paths(&["/workspace/readme.md"]);
        daemon.glob("*.MD").await.expect_paths(&["/workspace/README.MD"]);
        let grep = daemon.call("grep", json!({ "pattern": "hit", "glob": "*.md" })).await;
        assert_eq!(grep.lines(), ["/workspace/readme.md:1:hit"], "{}", grep.describe());
    }
}
