//! The skeleton of a cluster's repository, from `gitops-repo-template/`. Files that are there
//! already stay as they are.

use super::sign;
use super::splice::{Edit, Edits};
use crate::store::{AgentRelease, Cluster, Environment};
use anyhow::Context as _;
use rust_embed::RustEmbed;
use serde_json::Value;
use styrmin_renderer::layout::{FLUX_NAMESPACE, SYSTEM_NAMESPACE};
use styrmin_renderer::names::EnvironmentId;
use styrmin_renderer::objects::{self, Repository};
use styrmin_renderer::{canonical, layout, yaml};

const README: &str = include_str!("../../../gitops-repo-template/README.md");
const CODEOWNERS: &str = include_str!("../../../gitops-repo-template/CODEOWNERS");
const FLUX_README: &str = include_str!("../../../gitops-repo-template/flux/README.md");
const CI_GITHUB: &str = include_str!("../../../gitops-repo-template/ci/github.yaml");
const CI_GITLAB: &str = include_str!("../../../gitops-repo-template/ci/gitlab.yaml");
const AGENT_README: &str = include_str!("../../../gitops-repo-template/cluster/agent/README.md");

/// Name of the Secret with the public keys that Flux verifies commits with.
const KEYS: &str = "styrmin-git-keys";

/// The skeleton of a cluster. `public_url` is this server's, `own_key` what our commits are signed with.
///
/// # Errors
/// When an object cannot be written as YAML.
pub(super) fn cluster(row: &Cluster, public_url: &str, own_key: &str) -> anyhow::Result<Edits> {
    let files = [
        ("README.md", README.replace("{{cluster}}", &row.name)),
        ("CODEOWNERS", CODEOWNERS.to_owned()),
        ("ci/github.yaml", CI_GITHUB.replace("{{path}}", &row.path)),
        ("ci/gitlab.yaml", CI_GITLAB.replace("{{path}}", &row.path)),
        ("flux/README.md", FLUX_README.to_owned()),
        ("flux/styrmin.yaml", flux(row, public_url, own_key)?),
        ("cluster/agent/README.md", AGENT_README.to_owned()),
        ("cluster/namespace.yaml", yaml::to_string(&objects::system_namespace())?),
    ];
    Ok(files.into_iter().map(|(path, content)| (layout::below(&row.path, path), Edit::Keep(content))).collect())
}

/// What Flux needs once to follow a cluster's repository: its source, the root Kustomization, and trusted keys.
///
/// # Errors
/// When an object cannot be written as YAML.
pub fn flux(row: &Cluster, public_url: &str, own_key: &str) -> anyhow::Result<String> {
    let mut flux = objects::flux_root(&repository(row, public_url)).to_vec();
    trust(&mut flux, row, own_key, FLUX_NAMESPACE)?;
    Ok(objects::documents(&flux)?)
}

/// The agent's chart, as this server has it.
#[derive(RustEmbed)]
#[folder = "../helm/agent/"]
struct Chart;

/// The agent's chart and release: upgrades come with a commit.
///
/// # Errors
/// When an object cannot be written as YAML.
pub(super) fn agent(row: &Cluster, release: &AgentRelease, public_url: &str, own_key: &str) -> anyhow::Result<Edits> {
    let mut files: Vec<(String, String)> = Vec::new();
    // Kinds of Flux are in packages only.
    for name in Chart::iter().filter(|name| !name.starts_with("flux/")) {
        let content = Chart::get(&name).context("the chart of this server's agent")?.data.into_owned();
        files.push((name.into_owned(), String::from_utf8(content).context("the chart of this server's agent")?));
    }
    files.sort();
    // Named by content: another chart of the same version is another folder.
    let digest = canonical::digest_parts(files.iter().flat_map(|(name, content)| [name, content]));
    let folder = layout::chart_folder("styrmin-agent", &digest);
    let mut objects = objects::agent_release(&repository(row, public_url), &folder, &release.values);
    trust(&mut objects, row, own_key, SYSTEM_NAMESPACE)?;
    let below = |path: &str| layout::below(&row.path, path);
    let mut edits = Edits::new();
    for (name, content) in files {
        edits.insert(below(&format!("{folder}/{name}")), Edit::Keep(content));
    }
    edits.insert(below("cluster/agent/agent.yaml"), Edit::Write(objects::documents(&objects)?));
    Ok(edits)
}

/// Has the sources among `objects` accept only commits that are signed with our key or a trusted one, if the cluster
/// asks for that; the keys are a Secret in `namespace`.
fn trust(objects: &mut Vec<Value>, row: &Cluster, own_key: &str, namespace: &str) -> anyhow::Result<()> {
    let Some(trusted) = &row.trusted_keys else { return Ok(()) };
    let mut keys = vec![("styrmin.sshpub".to_owned(), own_key.to_owned())];
    for (index, key) in trusted.iter().enumerate() {
        let suffix = sign::key_suffix(key).map_err(anyhow::Error::msg)?;
        keys.push((format!("trusted-{}{suffix}", index + 1), key.clone()));
    }
    objects::verify(objects, namespace, KEYS, keys);
    Ok(())
}

/// Where Flux finds a cluster's files. `public_url` is this server's, which hosts those that are nowhere else.
fn repository(row: &Cluster, public_url: &str) -> Repository {
    let hosted = || format!("{}/git/{}.git", public_url.trim_end_matches('/'), row.name);
    Repository {
        url: row.git_url.clone().unwrap_or_else(hosted),
        branch: row.branch.clone(),
        prefix: row.path.clone(),
        secret: Some("styrmin-git".to_owned()),
    }
}

/// Namespace, shards and keep objects of an environment.
///
/// # Errors
/// When an object cannot be written as YAML.
pub fn environment(row: &Environment, prefix: &str) -> anyhow::Result<Edits> {
    let id: EnvironmentId = row.id.parse().map_err(anyhow::Error::msg).context("stored environment")?;
    let mut objects = vec![objects::environment_namespace(&id, &row.name)];
    let mut edits = Edits::new();
    for shard in 0..row.shards() {
        objects.push(objects::shard_kustomization(&id, shard, prefix));
        edits.insert(
            layout::below(prefix, &layout::shard_keep(&id, shard)),
            Edit::Write(yaml::to_string(&objects::shard_keep(&id, shard))?),
        );
    }
    edits.insert(layout::below(prefix, &layout::environment_file(&id)), Edit::Write(objects::documents(&objects)?));
    Ok(edits)
}
