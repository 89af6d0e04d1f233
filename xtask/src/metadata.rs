//! What `cargo metadata` says, as far as the checks need it.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use crate::stage::cargo;

/// The whole dependency graph.
#[derive(Debug, Deserialize)]
pub(crate) struct Metadata {
    pub(crate) packages: Vec<Package>,
    workspace_members: BTreeSet<String>,
    resolve: Resolve,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Package {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) license: Option<String>,
    /// Where it comes from; `None` is a path of ours.
    pub(crate) source: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Debug, Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Debug, Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<DependencyKind>,
}

#[derive(Debug, Deserialize)]
struct DependencyKind {
    /// `None` is an ordinary one.
    kind: Option<String>,
}

impl Dependency {
    /// Whether the built program holds it.
    fn is_ordinary(&self) -> bool {
        self.dep_kinds.iter().any(|kind| kind.kind.is_none())
    }
}

impl Metadata {
    /// Asks cargo.
    pub(crate) fn read() -> anyhow::Result<Self> {
        let mut command = cargo(&["metadata", "--format-version", "1", "--locked"]);
        let output = command.output().context("start cargo metadata")?;
        ensure!(
            output.status.success(),
            "cargo metadata: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// The packages of this workspace, and which of each other they use outside of tests.
    pub(crate) fn own_edges(&self) -> BTreeMap<&str, BTreeSet<&str>> {
        let names = self.names();
        let own = |id: &String| self.workspace_members.contains(id);
        let nodes = self.resolve.nodes.iter().filter(|node| own(&node.id));
        nodes
            .map(|node| {
                let uses = node.deps.iter().filter(|dep| own(&dep.pkg) && dep.is_ordinary());
                (names[node.id.as_str()], uses.map(|dep| names[dep.pkg.as_str()]).collect())
            })
            .collect()
    }

    /// Everything that ends up in a package, directly or not, outside of tests and build scripts.
    pub(crate) fn everything_in(&self, name: &str) -> BTreeSet<&str> {
        let names = self.names();
        let nodes: BTreeMap<_, _> =
            self.resolve.nodes.iter().map(|node| (node.id.as_str(), node)).collect();
        let own = self.workspace_members.iter().map(String::as_str);
        let mut open: Vec<&str> = own.filter(|id| names[id] == name).collect();
        let mut seen = BTreeSet::new();
        while let Some(id) = open.pop() {
            let deps = nodes[id].deps.iter().filter(|dep| dep.is_ordinary());
            open.extend(deps.map(|dep| dep.pkg.as_str()).filter(|id| seen.insert(*id)));
        }
        seen.into_iter().map(|id| names[id]).collect()
    }

    fn names(&self) -> BTreeMap<&str, &str> {
        self.packages.iter().map(|package| (package.id.as_str(), package.name.as_str())).collect()
    }
}
