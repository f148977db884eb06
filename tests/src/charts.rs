//! Our own charts, as the real helm renders them.

use crate::tools::{run, tool};
use crate::world::documents;
use serde_json::Value;
use std::path::{Path, PathBuf};
use tokio::process::Command;

/// The folder of a chart: `agent` or `server`.
#[must_use]
pub fn folder(chart: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../helm").join(chart)
}

/// The text of what a chart installs. `settings` are as for `--set`.
pub async fn template(chart: &Path, namespace: &str, settings: &[&str]) -> String {
    let mut command = Command::new(tool("helm"));
    command.arg("template").arg("release").arg(chart).args(["--namespace", namespace, "--kube-version", "1.36.0"]);
    for setting in settings {
        command.args(["--set", setting]);
    }
    String::from_utf8(run(&mut command, &[]).await).unwrap()
}

/// The objects of the agent's chart; hooks only when they are meant.
pub async fn agent(hooks: bool) -> Vec<Value> {
    let text = template(&folder("agent"), "styrmin-system", &["server.address=http://server.example.com"]).await;
    let is_hook = |object: &Value| !object["metadata"]["annotations"]["helm.sh/hook"].is_null();
    let objects = documents(&text).into_iter();
    objects.filter(|object| is_hook(object) == hooks).collect()
}
