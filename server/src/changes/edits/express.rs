//! What of an edited StyrminDeployment a deployment's own configuration can say. Pure.

use crate::changes::compute::Edit;
use crate::drivers::Catalog;
use crate::store::{Instance, Lifecycle};
use serde_json::Value;
use styrmin_renderer::config::{Level, Object, Patch};
use styrmin_renderer::context::SecretRef;
use styrmin_renderer::diff;
use styrmin_renderer::spec::{self, StyrminDeploymentSpec};

/// Settings of a component that its configuration has, too.
const COMPONENT: [&str; 6] = ["args", "command", "env_vars", "image", "replicas", "resources"];
/// Most fields that a message names.
const NAMED_MAX: usize = 10;

/// An edit as a change of the deployment.
#[derive(Debug, Default)]
pub(super) struct Expressed {
    /// The change.
    pub(super) edit: Edit,
    /// Fields that it takes over.
    pub(super) taken: Vec<String>,
    /// What it cannot say: field and reason.
    pub(super) refused: Vec<String>,
}

impl Expressed {
    /// In words.
    pub(super) fn message(&self) -> String {
        let mut parts = Vec::new();
        for (list, verb) in [(&self.taken, "taken over"), (&self.refused, "put back")] {
            if list.is_empty() {
                continue;
            }
            let mut text = list[..list.len().min(NAMED_MAX)].join(", ");
            if list.len() > NAMED_MAX {
                text.push_str(&format!(" and {} more", list.len() - NAMED_MAX));
            }
            parts.push(format!("{verb}: {text}"));
        }
        parts.join("; ")
    }
}

/// The difference from `before` to `found`, for a deployment that uses the driver `driver_name`.
pub(super) fn express(
    before: &Instance,
    found: &StyrminDeploymentSpec,
    driver_name: &str,
    catalog: &Catalog,
) -> Expressed {
    let mut out = Expressed::default();
    let mut set = Object::new();
    let (mut version, mut pin) = (None, None);
    for change in diff::specs(Some(&before.spec), found) {
        let path: Vec<String> =
            change.pointer.split('/').skip(1).map(|part| part.replace("~1", "/").replace("~0", "~")).collect();
        let path: Vec<&str> = path.iter().map(String::as_str).collect();
        let field = change.field.clone();
        let mut refuse = |reason: &str| out.refused.push(format!("{field} ({reason})"));
        let is_secret = [&change.old, &change.new].into_iter().flatten().any(|value| SecretRef::read(value).is_some());
        match path.as_slice() {
            _ if is_secret => {
                refuse("a secret is set as a parameter");
                continue;
            }
            ["lifecycle"] => {
                out.edit.lifecycle = Some(match found.lifecycle {
                    spec::Lifecycle::Stopped => Lifecycle::Stopped,
                    _ => Lifecycle::Running,
                });
            }
            ["applicationVersion"] => version = Some(found.application_version.clone()),
            // Follows from the one above.
            ["context", "app", "version"] if change.new == Some(found.application_version.clone().into()) => continue,
            ["driver", "version" | "digest"] if found.driver.name == driver_name => pin = Some(&found.driver),
            ["context", "instance", "config", rest @ ..] if !rest.is_empty() => {
                if !configure(&mut out.edit.config, &mut set, rest, &change, before) {
                    refuse("another level sets it; change it there, or set it to null");
                    continue;
                }
            }
            ["context", "components", component, setting, rest @ ..] if COMPONENT.contains(setting) => {
                let path = [&["components", component, setting], rest].concat();
                // What is not set shows as null there.
                let unset = diff::Change { new: change.new.clone().filter(|new| !new.is_null()), ..change.clone() };
                if !configure(&mut out.edit.config, &mut set, &path, &unset, before) {
                    refuse("it is not set on the deployment");
                    continue;
                }
            }
            ["context", "parameters", name, rest @ ..] => {
                let whole = found.context.pointer(&format!("/parameters/{}", change_key(&change.pointer)));
                match (rest.is_empty(), whole) {
                    (_, Some(value)) => {
                        out.edit.parameters.insert((*name).to_owned(), value.clone());
                    }
                    (_, None) if at_deployment(before, &format!("/parameters/{}", change_key(&change.pointer))) => {
                        out.edit.remove_parameters.push((*name).to_owned());
                    }
                    _ => {
                        refuse("the driver sets it");
                        continue;
                    }
                }
            }
            ["jobs"] => {
                refuse("a job is run by asking for it");
                continue;
            }
            _ => {
                refuse("it follows from other settings");
                continue;
            }
        }
        out.taken.push(field);
    }
    out.edit.config.set = set;
    if version.is_some() || pin.is_some() {
        let wanted = version.as_deref().unwrap_or(&found.application_version);
        // A digest says more than a version; a version that was edited alone counts.
        let pinned = pin.map(|driver| {
            let by_digest =
                catalog.by_digest.get(&driver.digest).filter(|_| driver.digest != before.spec.driver.digest);
            by_digest.map_or_else(|| driver.version.clone(), |driver| driver.version.to_string())
        });
        match catalog.select(driver_name, Some(wanted), pinned.as_deref()) {
            Ok((driver, version)) => out.edit.driver = Some((driver, version, pinned)),
            Err(error) => {
                let is_driver = |field: &String| field.starts_with("driver.") || field == "applicationVersion";
                let (gone, taken) = std::mem::take(&mut out.taken).into_iter().partition(is_driver);
                out.taken = taken;
                let gone: Vec<String> = gone;
                out.refused.push(format!("{} ({})", gone.join(", "), error.message));
            }
        }
    }
    out
}

/// The third token of a pointer, as it stands there.
fn change_key(pointer: &str) -> &str {
    pointer.split('/').nth(3).unwrap_or_default()
}

fn at_deployment(before: &Instance, pointer: &str) -> bool {
    before.origins.get(pointer) == Some(&Level::Deployment)
}

/// Puts one changed value of the configuration into the patch; `false`: it cannot be taken away, since the
/// deployment does not set it.
fn configure(patch: &mut Patch, set: &mut Object, path: &[&str], change: &diff::Change, before: &Instance) -> bool {
    match &change.new {
        Some(value) => {
            insert(set, path, value.clone());
            true
        }
        None => {
            let pointer: String =
                path.iter().map(|part| format!("/{}", part.replace('~', "~0").replace('/', "~1"))).collect();
            let set_here = at_deployment(before, &format!("/config{pointer}"));
            if set_here {
                patch.remove.push(pointer);
            }
            set_here
        }
    }
}

fn insert(object: &mut Object, path: &[&str], value: Value) {
    match path {
        [] => {}
        [last] => {
            object.insert((*last).to_owned(), value);
        }
        [first, rest @ ..] => {
            let inner = object.entry((*first).to_owned()).or_insert_with(|| Value::Object(Object::new()));
            if !inner.is_object() {
                *inner = Value::Object(Object::new());
            }
            if let Value::Object(inner) = inner {
                insert(inner, rest, value);
            }
        }
    }
}
