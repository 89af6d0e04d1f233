//! What the daemon is told, and the environment that its programs start with.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use cofferdam_sandbox::Plan;
use cofferdam_spec::EnvPolicy;

/// What a daemon needs to know.
#[derive(Debug)]
pub struct Config {
    /// The cell's plan, policy included.
    pub plan: Plan,
    /// Directory of the daemon's own files; it exists with mode 0700.
    pub state: PathBuf,
    /// Ends the daemon when for so long no client was connected and no process of a call lived.
    pub idle_exit: Option<Duration>,
    /// How long running calls may go on after the shutdown signal.
    pub drain_grace: Duration,
    /// Version that GetCapabilities reports.
    pub version: &'static str,
}

/// TERM of a program that runs on a terminal and whose call names none.
pub(crate) const TERM_DEFAULT: &str = "xterm-256color";

/// The environment of every program before its call adds to it. `own` looks a variable up in the
/// daemon's own environment; nothing is inherited but what the policy allows by name.
pub(crate) fn base_environment(
    policy: &EnvPolicy,
    own: impl Fn(&str) -> Option<String>,
) -> BTreeMap<String, String> {
    let fixed = [
        ("PATH", policy.path.as_str()),
        ("HOME", "/home/agent"),
        ("USER", "agent"),
        ("LOGNAME", "agent"),
        ("SHELL", "/bin/bash"),
        ("LANG", "C.UTF-8"),
        ("TMPDIR", "/tmp"),
        ("TERM", "dumb"),
        // A git with another prefix than /usr looks for the cell's gitconfig elsewhere.
        ("GIT_CONFIG_SYSTEM", "/etc/gitconfig"),
    ];
    let fixed = fixed.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let allowed = policy.allow.iter().filter_map(|name| Some((name.clone(), own(name)?)));
    let set = policy.set.iter().map(|(name, value)| (name.clone(), value.clone()));
    fixed.into_iter().chain(allowed).chain(set).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_policy_names_is_inherited() {
        let policy = EnvPolicy {
            allow: vec!["KEPT".to_owned(), "ABSENT".to_owned(), "BOTH".to_owned()],
            set: BTreeMap::from([("BOTH".to_owned(), "set".to_owned())]),
            path: "/bin".to_owned(),
        };
        let own = |name: &str| match name {
            "ABSENT" => None,
            "SECRET" => Some("hidden".to_owned()),
            name => Some(format!("own {name}")),
        };
        let environment = base_environment(&policy, own);
        let text: Vec<_> =
            environment.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let expected = [
            "BOTH=set",
            "GIT_CONFIG_SYSTEM=/etc/gitconfig",
            "HOME=/home/agent",
            "KEPT=own KEPT",
            "LANG=C.UTF-8",
            "LOGNAME=agent",
            "PATH=/bin",
            "SHELL=/bin/bash",
            "TERM=dumb",
            "TMPDIR=/tmp",
            "USER=agent",
        ];
        assert_eq!(text, expected);
    }
}
