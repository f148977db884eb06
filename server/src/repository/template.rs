//! The skeleton of a cluster's repository, from `gitops-repo-template/`. Files that are there
//! already stay as they are.

use super::sign;
use super::splice::{Edit, Edits};
use crate::store::{Cluster, Environment};
use anyhow::Context as _;
use styrmin_renderer::names::EnvironmentId;
use styrmin_renderer::objects::{self, Repository};
use styrmin_renderer::{layout, yaml};

const README: &str = include_str!("../../../gitops-repo-template/README.md");
const CODEOWNERS: &str = include_str!("../../../gitops-repo-template/CODEOWNERS");
const FLUX_README: &str = include_str!("../../../gitops-repo-template/flux/README.md");
const CI_GITHUB: &str = include_str!("../../../gitops-repo-template/ci/github.yaml");
const CI_GITLAB: &str = include_str!("../../../gitops-repo-template/ci/gitlab.yaml");
const AGENT_README: &str = include_str!("../../../gitops-repo-template/cluster/agent/README.md");

/// Name of the Secret with the public keys that Flux verifies commits with.
const KEYS: &str = "styrmin-git-keys";

/// The skeleton of a cluster. `url` is where its Flux fetches from, `own_key` what our commits are signed with.
///
/// # Errors
/// When an object cannot be written as YAML.
pub(super) fn cluster(row: &Cluster, url: &str, own_key: &str) -> anyhow::Result<Edits> {
    let repository = Repository {
        url: url.to_owned(),
        branch: row.branch.clone(),
        prefix: row.path.clone(),
        secret: Some("styrmin-git".to_owned()),
    };
    let mut flux = objects::flux_root(&repository).to_vec();
    if let Some(trusted) = &row.trusted_keys {
        let mut keys = vec![("styrmin.sshpub".to_owned(), own_key.to_owned())];
        for (index, key) in trusted.iter().enumerate() {
            let suffix = sign::key_suffix(key).map_err(anyhow::Error::msg)?;
            keys.push((format!("trusted-{}{suffix}", index + 1), key.clone()));
        }
        objects::verify(&mut flux, KEYS, keys);
    }
    let files = [
        ("README.md", README.replace("{{cluster}}", &row.name)),
        ("CODEOWNERS", CODEOWNERS.to_owned()),
        ("ci/github.yaml", CI_GITHUB.replace("{{path}}", &row.path)),
        ("ci/gitlab.yaml", CI_GITLAB.replace("{{path}}", &row.path)),
        ("flux/README.md", FLUX_README.to_owned()),
        ("flux/styrmin.yaml", objects::documents(&flux)?),
        ("cluster/agent/README.md", AGENT_README.to_owned()),
        ("cluster/namespace.yaml", yaml::to_string(&objects::system_namespace())?),
    ];
    Ok(files.into_iter().map(|(path, content)| (layout::below(&row.path, path), Edit::Keep(content))).collect())
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
