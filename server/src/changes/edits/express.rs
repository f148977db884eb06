//! What of an edited StyrminDeployment a deployment's own configuration can say. Pure.

use crate::changes::compute::Edit;
use crate::drivers::Catalog;
use crate::store::{Instance, Lifecycle};
use serde_json::Value;
use styrmin_renderer::config::{self, Level, Object, Patch};
use styrmin_renderer::context::SecretRef;
use styrmin_renderer::diff;
use styrmin_renderer::spec::{self, StyrminDeploymentSpec};

/// Settings of a component that its configuration has, too.
const COMPONENT: [&str; 6] = ["args", "command", "env_vars", "image", "replicas", "resources"];
/// Most fields that a message names.
const NAMED_MAX: usize = 10;

/// An edit as a change of the deployment.
#[derive(Debug, Default)]
pub(in crate::changes) struct Expressed {
    /// The change.
    pub(in crate::changes) edit: Edit,
    /// Fields that it takes over.
    pub(in crate::changes) taken: Vec<String>,
    /// What it cannot say: field and reason.
    pub(in crate::changes) refused: Vec<String>,
}

impl Expressed {
    /// In words.
    pub(in crate::changes) fn message(&self) -> String {
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
pub(in crate::changes) fn express(
    before: &Instance,
    found: &StyrminDeploymentSpec,
    driver_name: &str,
    catalog: &Catalog,
) -> Expressed {
    let mut out = Expressed::default();
    let mut set = Object::new();
    let (mut version, mut pin) = (None, None);
    for change in diff::specs(Some(&before.spec), found) {
        let path: Vec<String> = config::tokens(&change.pointer).collect();
        let path: Vec<&str> = path.iter().map(String::as_str).collect();
        let field = change.field.clone();
        let mut refuse = |reason: &str| out.refused.push(format!("{field} ({reason})"));
        let is_secret = change.pointer.contains("/secretRef/")
            || [&change.old, &change.new].into_iter().flatten().any(|value| SecretRef::read(value).is_some());
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
            ["driver", "digest"]
                if found.driver.version == before.spec.driver.version
                    && !catalog.by_digest.contains_key(&found.driver.digest) =>
            {
                refuse("no driver with this digest is loaded");
                continue;
            }
            ["driver", "version" | "digest"] if found.driver.name == driver_name => pin = Some(&found.driver),
            // One value, whatever is in it.
            ["context", "instance", "config", "dedicated_ingress", ..] => {
                match found.context.pointer("/instance/config/dedicated_ingress") {
                    Some(value) => insert(&mut set, &["dedicated_ingress"], value.clone()),
                    None if at_deployment(before, "/config/dedicated_ingress") => {
                        out.edit.config.remove.push("/dedicated_ingress".to_owned());
                    }
                    None => {
                        refuse("another level sets it; change it there, or set it to null");
                        continue;
                    }
                }
            }
            ["context", "instance", "config", rest @ ..] if !rest.is_empty() => {
                if !configure(&mut out.edit.config, &mut set, rest, &change, before) {
                    refuse("another level sets it; change it there, or set it to null");
                    continue;
                }
            }
            // What the edited configuration leads to by itself is no setting of its own.
            ["context", "components", component, setting, rest @ ..]
                if follows(found, component, setting, rest, change.new.as_ref()) =>
            {
                continue;
            }
            ["context", "components", component, setting, rest @ ..] if COMPONENT.contains(setting) => {
                let path = [&["components", component, setting], rest].concat();
                // What is not set shows as null there.
                let is_set = |new: &Value| !new.is_null() || *setting == "env_vars";
                let unset = diff::Change { new: change.new.clone().filter(is_set), ..change.clone() };
                if !configure(&mut out.edit.config, &mut set, &path, &unset, before) {
                    refuse("it is not set on the deployment");
                    continue;
                }
            }
            ["context", "parameters", name, ..] => {
                let pointer = format!("/parameters/{}", config::escape(name));
                match found.context.pointer(&pointer) {
                    Some(value) => {
                        out.edit.parameters.insert((*name).to_owned(), value.clone());
                    }
                    None if at_deployment(before, &pointer) => out.edit.remove_parameters.push((*name).to_owned()),
                    None => {
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

/// Whether a component's value is what the edited configuration says for it, or for all components.
fn follows(found: &StyrminDeploymentSpec, component: &str, setting: &str, rest: &[&str], new: Option<&Value>) -> bool {
    let config = &found.context["instance"]["config"];
    let at = |root: &Value| rest.iter().try_fold(root, |value, key| value.get(key)).cloned();
    let own = at(&config["components"][component][setting]);
    let said = match own {
        None if setting == "env_vars" => at(&config["env_vars"]),
        own => own,
    };
    // Gone from both, or the same in both.
    match (new, said) {
        (Some(new), Some(said)) => *new == said,
        (None, None) => setting == "env_vars",
        _ => false,
    }
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
            let pointer: String = path.iter().map(|part| format!("/{}", config::escape(part))).collect();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::InstanceState;
    use serde_json::json;
    use std::collections::BTreeMap;

    fn before() -> Instance {
        let secret = json!({ "secretRef": { "name": "s", "key": "password", "fingerprint": "f1" } });
        let spec = json!({
            "deploymentId": "d23456789012", "instanceId": "i", "lifecycle": "running",
            "driver": { "name": "web", "version": "1.0.0", "digest": "d1" }, "applicationVersion": "1",
            "context": {
                "app": { "name": "web", "version": "1" },
                "components": { "web": { "env_vars": { "A": "1", "E": "e" }, "replicas": 2, "image": null } },
                "instance": { "config": {
                    "env_vars": { "A": "1", "E": "e" }, "ip_whitelist": ["10.0.0.0/8"],
                    "dedicated_ingress": { "class": "x", "size": 1 },
                } },
                "parameters": { "image": "nginx", "port": 80, "password": secret },
            },
        });
        let here = ["/config/env_vars/A", "/parameters/image"].map(|at| (at.to_owned(), Level::Deployment));
        let there = ["/config/env_vars/E", "/config/dedicated_ingress"].map(|at| (at.to_owned(), Level::Environment));
        Instance {
            id: "i".into(),
            deployment_id: "d23456789012".into(),
            sequence: 1,
            workflow: "create".into(),
            spec: serde_json::from_value(spec).unwrap(),
            origins: here.into_iter().chain(there).collect::<BTreeMap<_, _>>(),
            document: Some(String::new()),
            secrets_file: None,
            secrets_stamp: None,
            sources: None,
            state: InstanceState::Active,
            revision: None,
            task_id: "t".into(),
            author_name: String::new(),
            author_email: String::new(),
            created_at: 0,
        }
    }

    fn said(change: impl FnOnce(&mut Value)) -> (Value, String) {
        let before = before();
        let mut value = before.spec.to_value();
        change(&mut value);
        let found: StyrminDeploymentSpec = serde_json::from_value(value).unwrap();
        let said = express(&before, &found, "web", &Catalog::default());
        let Edit { config, parameters, remove_parameters, lifecycle, .. } = &said.edit;
        let edit = json!({
            "set": config.set, "remove": config.remove, "parameters": parameters,
            "remove_parameters": remove_parameters, "stopped": *lifecycle == Some(Lifecycle::Stopped),
        });
        (edit, said.message())
    }

    fn edit(set: Value, remove: &[&str]) -> Value {
        json!({ "set": set, "remove": remove, "parameters": {}, "remove_parameters": [], "stopped": false })
    }

    #[test]
    fn each_kind_of_edit_says_what_a_person_would_have_asked_for() {
        let config =
            |value: &mut Value, change: &dyn Fn(&mut Value)| change(&mut value["context"]["instance"]["config"]);
        let web = |value: &mut Value, change: &dyn Fn(&mut Value)| change(&mut value["context"]["components"]["web"]);
        type Change<'a> = Box<dyn FnOnce(&mut Value) + 'a>;
        let table: Vec<(&str, Change<'_>, Value, &str)> = vec![
            (
                "in both places, it is one setting of all components",
                Box::new(|value| {
                    config(value, &|config| config["env_vars"]["A"] = json!("2"));
                    web(value, &|web| web["env_vars"]["A"] = json!("2"));
                }),
                edit(json!({ "env_vars": { "A": "2" } }), &[]),
                "taken over: context.instance.config.env_vars.A",
            ),
            (
                "in one component's place, it is one of that component",
                Box::new(|value| web(value, &|web| (web["env_vars"]["A"], web["replicas"]) = (json!("2"), json!(5)))),
                edit(json!({ "components": { "web": { "env_vars": { "A": "2" }, "replicas": 5 } } }), &[]),
                "taken over: context.components.web.env_vars.A, context.components.web.replicas",
            ),
            (
                "gone from both places, it is not set any more",
                Box::new(|value| {
                    config(value, &|config| drop(config["env_vars"].as_object_mut().unwrap().remove("A")));
                    web(value, &|web| drop(web["env_vars"].as_object_mut().unwrap().remove("A")));
                }),
                edit(json!({}), &["/env_vars/A"]),
                "taken over: context.instance.config.env_vars.A",
            ),
            (
                "what the environment sets cannot be taken away here",
                Box::new(|value| {
                    config(value, &|config| drop(config["env_vars"].as_object_mut().unwrap().remove("E")));
                }),
                edit(json!({}), &[]),
                "put back: context.instance.config.env_vars.E (another level sets it; change it there, or set it to null)",
            ),
            (
                "null and lists are values",
                Box::new(|value| {
                    config(value, &|config| {
                        (config["env_vars"]["E"], config["ip_whitelist"]) = (Value::Null, json!([]));
                    });
                }),
                edit(json!({ "env_vars": { "E": null }, "ip_whitelist": [] }), &[]),
                "taken over: context.instance.config.env_vars.E, context.instance.config.ip_whitelist",
            ),
            (
                "a dedicated ingress is one value",
                Box::new(|value| config(value, &|config| config["dedicated_ingress"]["size"] = json!(2))),
                edit(json!({ "dedicated_ingress": { "class": "x", "size": 2 } }), &[]),
                "taken over: context.instance.config.dedicated_ingress.size",
            ),
            (
                "a secret is no text",
                Box::new(|value| value["context"]["parameters"]["password"]["secretRef"]["fingerprint"] = json!("f2")),
                edit(json!({}), &[]),
                "put back: context.parameters.password.secretRef.fingerprint (a secret is set as a parameter)",
            ),
            (
                "a driver that nobody loaded",
                Box::new(|value| value["driver"]["digest"] = json!("d2")),
                edit(json!({}), &[]),
                "put back: driver.digest (no driver with this digest is loaded)",
            ),
            (
                "what follows from the rest",
                Box::new(|value| value["context"]["app"]["name"] = json!("x")),
                edit(json!({}), &[]),
                "put back: context.app.name (it follows from other settings)",
            ),
        ];
        for (what, change, expected, message) in table {
            assert_eq!(said(change), (expected, message.to_owned()), "{what}");
        }
        let (edit, _) = said(|value| {
            value["lifecycle"] = json!("stopped");
            value["context"]["parameters"]["port"] = json!(81);
            value["context"]["parameters"].as_object_mut().unwrap().remove("image");
        });
        assert_eq!(
            edit,
            json!({ "set": {}, "remove": [], "parameters": { "port": 81 }, "remove_parameters": ["image"], "stopped": true })
        );
    }
}
