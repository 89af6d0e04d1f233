//! Licences, sources and banned packages, by `deny.toml`.
//!
//! `cargo deny check licenses bans sources` says the same. This reads the same file and needs
//! nothing installed: building cargo-deny takes longer than all of our own build.

use std::collections::BTreeSet;

use anyhow::{Context as _, bail, ensure};
use serde::Deserialize;

use crate::metadata::{Metadata, Package};

/// As far as this check reads `deny.toml`.
#[derive(Debug, Deserialize)]
struct Deny {
    licenses: Licenses,
    bans: Bans,
}

#[derive(Debug, Deserialize)]
struct Licenses {
    allow: BTreeSet<String>,
    #[serde(default)]
    exceptions: Vec<Exception>,
}

#[derive(Debug, Deserialize)]
struct Exception {
    #[serde(rename = "crate")]
    name: String,
    allow: BTreeSet<String>,
}

#[derive(Debug, Deserialize)]
struct Bans {
    deny: Vec<Ban>,
}

#[derive(Debug, Deserialize)]
struct Ban {
    #[serde(rename = "crate")]
    name: String,
}

/// How cargo names the registry that a manifest uses by default.
const DEFAULT_REGISTRY: &str = "registry+";

/// Checks every package of the lock file; all breaches are reported.
pub(crate) fn check(metadata: &Metadata) -> anyhow::Result<()> {
    let text = std::fs::read_to_string("deny.toml").context("read deny.toml")?;
    let deny: Deny = toml::from_str(&text).context("deny.toml")?;
    let mut breaches = Vec::new();
    for package in &metadata.packages {
        let of = format!("{} {}", package.name, package.version);
        match license_allowed(package, &deny.licenses) {
            Ok(true) => {}
            Ok(false) => breaches.push(format!("{of}: licence {:?}", package.license)),
            Err(error) => breaches.push(format!("{of}: {error}")),
        }
        let registry = |source: &String| source.starts_with(DEFAULT_REGISTRY);
        if !package.source.as_ref().is_none_or(registry) {
            breaches.push(format!("{of}: comes from {:?}", package.source));
        }
        if deny.bans.deny.iter().any(|ban| ban.name == package.name) {
            breaches.push(format!("{of}: is banned"));
        }
    }
    ensure!(breaches.is_empty(), "deny.toml:\n  {}", breaches.join("\n  "));
    Ok(())
}

fn license_allowed(package: &Package, licenses: &Licenses) -> anyhow::Result<bool> {
    let expression = package.license.as_deref().context("no licence is named")?;
    let exceptions = licenses.exceptions.iter().filter(|other| other.name == package.name);
    let excepted: BTreeSet<&String> = exceptions.flat_map(|other| &other.allow).collect();
    satisfied(expression, |id| licenses.allow.contains(id) || excepted.contains(&id.to_owned()))
}

/// Whether an SPDX expression can be met by licences for which `allowed` holds.
fn satisfied(expression: &str, allowed: impl Fn(&str) -> bool) -> anyhow::Result<bool> {
    // Before SPDX expressions cargo separated alternatives by a slash.
    let text = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = text.split_whitespace().collect();
    let mut parser = Parser { words: &words, allowed: &allowed };
    let result = parser.alternatives()?;
    ensure!(parser.words.is_empty(), "licence {expression:?} cannot be read");
    Ok(result)
}

struct Parser<'a> {
    words: &'a [&'a str],
    allowed: &'a dyn Fn(&str) -> bool,
}

impl Parser<'_> {
    fn take(&mut self, word: &str) -> bool {
        match self.words.split_first() {
            Some((first, rest)) if *first == word => {
                self.words = rest;
                true
            }
            _ => false,
        }
    }

    fn alternatives(&mut self) -> anyhow::Result<bool> {
        let mut result = self.parts()?;
        while self.take("OR") {
            result |= self.parts()?;
        }
        Ok(result)
    }

    fn parts(&mut self) -> anyhow::Result<bool> {
        let mut result = self.one()?;
        while self.take("AND") {
            result &= self.one()?;
        }
        Ok(result)
    }

    fn one(&mut self) -> anyhow::Result<bool> {
        if self.take("(") {
            let result = self.alternatives()?;
            ensure!(self.take(")"), "a licence's bracket is not closed");
            return Ok(result);
        }
        let Some((id, rest)) = self.words.split_first() else { bail!("a licence ends early") };
        self.words = rest;
        if !self.take("WITH") {
            return Ok((self.allowed)(id));
        }
        let Some((exception, rest)) = self.words.split_first() else {
            bail!("a licence ends after WITH")
        };
        self.words = rest;
        Ok((self.allowed)(&format!("{id} WITH {exception}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_met_as_their_brackets_say() {
        let allowed =
            |id: &str| ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"].contains(&id);
        let table = [
            ("MIT", true),
            ("GPL-3.0", false),
            ("GPL-3.0 OR MIT", true),
            ("GPL-3.0/MIT", true),
            ("MIT AND GPL-3.0", false),
            ("MIT AND (GPL-3.0 OR Apache-2.0)", true),
            ("GPL-3.0 OR MIT AND GPL-2.0", false),
            ("Apache-2.0 WITH LLVM-exception", true),
            ("MIT WITH LLVM-exception", false),
        ];
        for (expression, expected) in table {
            assert_eq!(satisfied(expression, allowed).unwrap(), expected, "{expression}");
        }
        assert!(satisfied("MIT AND", allowed).is_err());
        assert!(satisfied("(MIT", allowed).is_err());
    }
}
