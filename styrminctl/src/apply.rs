//! `deployments apply`: the difference between a file and what a deployment sets itself, as one change.

use super::{Asked, all, update};
use anyhow::{Context as _, bail};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use styrmin_client::Client;
use styrmin_renderer::yaml;

/// What a file says of a deployment.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    environment: String,
    name: String,
    driver: String,
    application_version: String,
    driver_version: Option<String>,
    #[serde(default)]
    config: Map<String, Value>,
    #[serde(default)]
    parameters: Map<String, Value>,
}

/// The change that makes a deployment what the file says.
pub(crate) async fn asked(client: &Client, text: &str) -> anyhow::Result<Asked> {
    let file: File = yaml::from_str(text)?;
    let fields = "id name driver lifecycle config parameters environment { id } newestInstance { id }";
    let known = all(client, "deployments", fields).await?;
    let is = |one: &&Value| {
        one["name"] == file.name.as_str()
            && one["environment"]["id"] == file.environment.as_str()
            && one["lifecycle"] != "DELETING"
    };
    let Some(known) = known.as_array().into_iter().flatten().find(is) else {
        let input = json!({
            "environment": file.environment, "name": file.name, "driver": file.driver,
            "applicationVersion": file.application_version, "driverVersion": file.driver_version,
            "config": file.config, "parameters": file.parameters,
        });
        return Ok(Asked::new("createDeployment", [("input", "CreateDeploymentInput!", input)]));
    };
    if known["driver"] != file.driver.as_str() {
        bail!("driver: deployment \"{}\" has driver {}, for ever; create another one", file.name, known["driver"]);
    }
    let id = known["id"].as_str().context("the server gave no id")?;
    let mut remove = Vec::new();
    unset(&known["config"], &Value::Object(file.config.clone()), "", &mut remove);
    let parameters = known["parameters"].as_object().into_iter().flatten();
    let gone: Vec<&String> =
        parameters.map(|(name, _)| name).filter(|name| !file.parameters.contains_key(*name)).collect();
    let input = json!({
        "config": { "set": file.config, "remove": remove }, "parameters": file.parameters, "removeParameters": gone,
        "applicationVersion": file.application_version, "driverVersion": file.driver_version,
    });
    // What is removed follows from what was read: from nothing newer.
    Ok(update(id, input).based_on(&known["newestInstance"]["id"]))
}

/// JSON pointers of what is set and the file does not set.
fn unset(known: &Value, file: &Value, pointer: &str, found: &mut Vec<String>) {
    let Value::Object(known) = known else { return };
    for (key, value) in known {
        let pointer = format!("{pointer}/{}", key.replace('~', "~0").replace('/', "~1"));
        match file.get(key) {
            None => found.push(pointer),
            Some(wanted) => unset(value, wanted, &pointer, found),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::unset;
    use serde_json::json;

    #[test]
    fn what_the_file_does_not_set_is_removed() {
        let known = json!({ "env_vars": { "A": "a", "B/c": null }, "ingress_class": "nginx", "ip_whitelist": ["x"] });
        let file = json!({ "env_vars": { "A": "b" }, "ip_whitelist": [] });
        let mut found = Vec::new();
        unset(&known, &file, "", &mut found);
        assert_eq!(found, ["/env_vars/B~1c", "/ingress_class"]);
    }
}
