//! The kinds that the agent's chart brings, applied by a Job before each install and upgrade: Helm itself only
//! makes those that are missing, and never changes one.
//!
//! [`step`] decides, and is pure. Everything is decided before anything is written, so a kind that cannot be
//! brought up to date leaves all others as they were. What may not enter: what happens to objects of a kind.

use anyhow::{Context as _, bail, ensure};
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, Preconditions};
use kube::core::GroupVersionKind;
use kube::discovery::ApiResource;
use kube::{Client, Error, ResourceExt as _};
use serde_json::Value;
use std::path::Path;
use std::time::Duration;
use styrmin_renderer::{spec, yaml};
use tracing::info;

/// Owns what the Job writes.
const FIELD_MANAGER: &str = "styrmin-agent-crds";
/// How long a kind may take to be gone, or to be served.
const LIMIT: Duration = Duration::from_secs(60);
/// How often that is looked at.
const PAUSE: Duration = Duration::from_millis(250);
/// Most bytes of one file of kinds.
const FILE_MAX: u64 = 4 << 20;

/// What is to be done about one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Apply it.
    Apply,
    /// Delete it and make it again: it has no objects, and what it stored in is not a version any more.
    Replace,
    /// Nothing can be done without somebody's help.
    Refuse(String),
}

/// What is to be done about a kind, which has objects such as `object`, or none.
#[must_use]
pub fn step(wanted: &Value, existing: Option<&Value>, object: Option<&str>) -> Step {
    let unlisted = existing.map(|existing| unlisted(wanted, existing)).unwrap_or_default();
    let Some(version) = unlisted.first() else { return Step::Apply };
    let name = wanted["metadata"]["name"].as_str().unwrap_or_default();
    let newest = storage(wanted);
    match object {
        None => Step::Replace,
        Some(object) => Step::Refuse(format!(
            "CustomResourceDefinition {name}: objects may be stored in version {version}, which the new definition \
             does not list any more, and there are objects, such as {object}. Write each of them once more in version \
             {newest}, take {version} from status.storedVersions of the definition, and try again; or delete the \
             objects, if nobody needs them. Nothing was changed"
        )),
    }
}

/// Versions that objects may be stored in, and that the new definition does not have.
fn unlisted<'a>(wanted: &Value, existing: &'a Value) -> Vec<&'a str> {
    let listed = |version: &str| versions(wanted).any(|known| known["name"] == version);
    let stored = existing["status"]["storedVersions"].as_array().into_iter().flatten();
    stored.filter_map(Value::as_str).filter(|version| !listed(version)).collect()
}

fn versions(definition: &Value) -> impl Iterator<Item = &Value> {
    definition["spec"]["versions"].as_array().into_iter().flatten()
}

/// The version that objects are stored in from now on.
fn storage(definition: &Value) -> &str {
    let storage = versions(definition).find(|version| version["storage"] == true);
    storage.and_then(|version| version["name"].as_str()).unwrap_or_default()
}

/// Our kind, and those in the files of `folders` (`*.yaml`, one in each).
///
/// # Errors
/// When a file cannot be read, or holds something else.
pub async fn wanted(folders: &[impl AsRef<Path>]) -> anyhow::Result<Vec<Value>> {
    let mut all = vec![spec::crd()];
    for folder in folders.iter().map(AsRef::as_ref) {
        let what = || format!("the folder of kinds {}", folder.display());
        let mut entries = tokio::fs::read_dir(folder).await.with_context(what)?;
        let mut files = Vec::new();
        while let Some(entry) = entries.next_entry().await.with_context(what)? {
            let path = entry.path();
            if path.extension().is_some_and(|extension| extension == "yaml") {
                files.push(path);
            }
        }
        files.sort();
        for path in files {
            let what = || format!("the file of kinds {}", path.display());
            let size = tokio::fs::metadata(&path).await.with_context(what)?.len();
            ensure!(size <= FILE_MAX, "{}: {size} bytes, of which {FILE_MAX} may be", what());
            let text = tokio::fs::read_to_string(&path).await.with_context(what)?;
            let document: Value = yaml::from_str(&text).with_context(what)?;
            let kind = &document["kind"];
            ensure!(kind == "CustomResourceDefinition", "{}: {kind} is no CustomResourceDefinition", what());
            all.push(document);
        }
    }
    Ok(all)
}

/// Brings the cluster's kinds up to `wanted`.
///
/// # Errors
/// When one has objects in a version that it does not have any more, or the API server refuses.
pub async fn apply(client: &Client, wanted: &[Value]) -> anyhow::Result<()> {
    let api = definitions(client);
    let mut steps = Vec::new();
    for definition in wanted {
        let name = definition["metadata"]["name"].as_str().context("a CustomResourceDefinition without a name")?;
        let existing = api.get_opt(name).await.with_context(|| format!("reading CustomResourceDefinition {name}"))?;
        let existing = existing.map(serde_json::to_value).transpose()?;
        let object = match &existing {
            Some(existing) if !unlisted(definition, existing).is_empty() => one_of(client, existing).await?,
            _ => None,
        };
        steps.push((name, step(definition, existing.as_ref(), object.as_deref()), definition));
    }
    let refused: Vec<&str> = steps
        .iter()
        .filter_map(|(_, step, _)| if let Step::Refuse(why) = step { Some(&**why) } else { None })
        .collect();
    if !refused.is_empty() {
        bail!("{}", refused.join("\n"));
    }
    for (name, step, definition) in steps {
        if step == Step::Replace {
            // Somebody may have made one meanwhile.
            let existing = api.get(name).await.with_context(|| format!("reading CustomResourceDefinition {name}"))?;
            let uid = existing.metadata.uid.clone();
            let object = one_of(client, &serde_json::to_value(existing)?).await?;
            if let Some(object) = object {
                bail!(
                    "CustomResourceDefinition {name}: {object} was made in a version that it does not have any more, right now: try again"
                );
            }
            info!(kind = name, "deleting a kind without objects, to make it again");
            remove(&api, name, uid).await?;
        }
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        let written = api.patch(name, &parameters, &Patch::Apply(definition)).await;
        written.with_context(|| format!("applying CustomResourceDefinition {name}"))?;
        until(&format!("CustomResourceDefinition {name} is not served"), async || Ok(is_served(&api, name).await?))
            .await?;
        info!(kind = name, "applied");
    }
    Ok(())
}

/// All kinds of the cluster.
pub(crate) fn definitions(client: &Client) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("apiextensions.k8s.io", "v1", "CustomResourceDefinition");
    Api::all_with(client.clone(), &ApiResource::from_gvk(&kind))
}

/// An object of a kind, if it has any.
async fn one_of(client: &Client, definition: &Value) -> anyhow::Result<Option<String>> {
    let text = |pointer: &str| definition.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let (group, kind, plural) = (text("/spec/group"), text("/spec/names/kind"), text("/spec/names/plural"));
    let served = versions(definition).find(|version| version["served"] == true);
    let Some(version) = served.and_then(|version| version["name"].as_str()) else {
        // Nobody can look, so nobody can say that there are none.
        return Ok(Some("those of versions that are not served".into()));
    };
    let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural);
    let found = Api::<DynamicObject>::all_with(client.clone(), &resource).list(&ListParams::default().limit(1)).await;
    let found = found.with_context(|| format!("looking for objects of {kind} ({group})"))?;
    Ok(found.items.first().map(|one| format!("{kind} {}/{}", one.namespace().unwrap_or_default(), one.name_any())))
}

async fn remove(api: &Api<DynamicObject>, name: &str, uid: Option<String>) -> anyhow::Result<()> {
    let exactly = DeleteParams::default().preconditions(Preconditions { uid, ..Preconditions::default() });
    match api.delete(name, &exactly).await {
        Err(Error::Api(status)) if status.code == 404 => {}
        answer => drop(answer.with_context(|| format!("deleting CustomResourceDefinition {name}"))?),
    }
    until(&format!("CustomResourceDefinition {name} does not go"), async || Ok(api.get_opt(name).await?.is_none()))
        .await
}

async fn is_served(api: &Api<DynamicObject>, name: &str) -> kube::Result<bool> {
    let found = api.get(name).await?;
    let mut conditions = found.data["status"]["conditions"].as_array().into_iter().flatten();
    Ok(conditions.any(|one| one["type"] == "Established" && one["status"] == "True"))
}

async fn until(otherwise: &str, is: impl AsyncFn() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    let wait = async {
        while !is().await? {
            tokio::time::sleep(PAUSE).await;
        }
        anyhow::Ok(())
    };
    let waited = tokio::time::timeout(LIMIT, wait).await;
    waited.unwrap_or_else(|_| bail!("{otherwise} after {} s", LIMIT.as_secs()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn definition(versions: &[&str], stored: &[&str]) -> Value {
        let newest = versions.last();
        let versions: Vec<Value> = versions
            .iter()
            .map(|name| json!({ "name": name, "served": true, "storage": Some(name) == newest }))
            .collect();
        json!({ "metadata": { "name": "things.example.com" }, "spec": { "versions": versions }, "status": { "storedVersions": stored } })
    }

    #[test]
    fn a_stored_version_that_is_not_listed_any_more_is_replaced_or_refused() {
        let wanted = definition(&["v1", "v2"], &[]);
        for (existing, object, expected) in [
            (None, None, "apply"),
            (Some(definition(&["v1"], &["v1"])), Some("n/a"), "apply"),
            (Some(definition(&["v0", "v1"], &["v1"])), Some("n/a"), "apply"),
            (Some(definition(&["v0"], &["v0"])), None, "replace"),
            (Some(definition(&["v0", "v1"], &["v0", "v1"])), Some("n/a"), "refuse"),
        ] {
            let found = match step(&wanted, existing.as_ref(), object) {
                Step::Apply => "apply",
                Step::Replace => "replace",
                Step::Refuse(why) => {
                    for part in
                        ["things.example.com", "version v0", "such as n/a", "in version v2", "status.storedVersions"]
                    {
                        assert!(why.contains(part), "{part}: {why}");
                    }
                    "refuse"
                }
            };
            assert_eq!(found, expected, "{existing:?}");
        }
    }
}
