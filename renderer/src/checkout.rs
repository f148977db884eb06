//! Checks the files of a cluster's repository without a server: what would break in the cluster, and in words what
//! differs from a base. For jobs and hooks of people's repositories.

use crate::context::{self, SecretRef};
use crate::driver::{DRIVER_FILE, Driver, FileProblem, VALUES_FILE};
use crate::names::{DeploymentId, EnvironmentId};
use crate::spec::{self, SEQUENCE_ANNOTATION, StyrminDeploymentSpec};
use crate::yaml::{self, Lines, Segment};
use crate::{canonical, diff, layout, objects};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

/// What a check found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Would break something in the cluster.
    pub problems: Vec<FileProblem>,
    /// What differs from the base, a line each.
    pub changes: Vec<String>,
    /// Deployments that were looked at.
    pub deployments: usize,
}

/// Files by path below the cluster's folder. Only those below [`layout::FOLDERS`] are looked at.
pub type Files = BTreeMap<String, String>;

/// Annotation of a driver's ConfigMap.
const DIGEST_ANNOTATION: &str = "styrmin.io/driver-digest";

/// Checks `files`, and says what differs from `base`.
#[must_use]
pub fn check(files: &Files, base: Option<&Files>) -> Report {
    let mut check = Check { files, report: Report::default(), drivers: BTreeMap::new(), places: BTreeMap::new() };
    check.drivers();
    check.environments();
    for (path, text) in files {
        check.document(path, text);
    }
    check.secrets();
    if let Some(base) = base {
        check.against(base);
    }
    check.report.problems.sort();
    check.report.problems.dedup();
    check.report
}

struct Check<'a> {
    files: &'a Files,
    report: Report,
    /// Drivers in the repository, by digest.
    drivers: BTreeMap<String, Driver>,
    /// Where each deployment's document is, with what it asks for.
    places: BTreeMap<String, (String, StyrminDeploymentSpec)>,
}

/// A path of a deployment's folder: environment, shard, deployment, file.
fn place(path: &str) -> Option<(&str, &str, &str, &str)> {
    match path.split('/').collect::<Vec<_>>().as_slice() {
        ["environments", environment, shard, deployment, file] => Some((environment, shard, deployment, file)),
        _ => None,
    }
}

impl Check<'_> {
    fn problem(&mut self, path: &str, line: u64, field: &str, message: impl Into<String>) {
        let (file, field, message) = (path.to_owned(), field.to_owned(), message.into());
        self.report.problems.push(FileProblem { file, line, field, message });
    }

    /// Every driver's ConfigMap is what its digest says.
    fn drivers(&mut self) {
        for (path, text) in self.files.iter().filter(|(path, _)| path.starts_with("cluster/drivers/")) {
            let value: Value = match yaml::from_str(text) {
                Ok(value) => value,
                Err(error) => {
                    self.problem(path, error.line, "", error.message);
                    continue;
                }
            };
            let digest = value["metadata"]["annotations"][DIGEST_ANNOTATION].as_str().unwrap_or_default().to_owned();
            if value["kind"] != "ConfigMap" || digest.is_empty() {
                self.problem(path, 0, "", "is no driver; Styrmin writes one ConfigMap for each");
                continue;
            }
            let data: BTreeMap<String, String> = serde_json::from_value(value["data"].clone()).unwrap_or_default();
            match Driver::from_definition(data.clone(), &digest) {
                Err(problems) => {
                    for problem in problems {
                        self.problem(path, 0, &format!("data.{}", problem.file), problem.to_string());
                    }
                }
                Ok(driver) => {
                    if *path != layout::driver_file(driver.name(), &digest) {
                        self.problem(
                            path,
                            0,
                            &format!("metadata.annotations.{DIGEST_ANNOTATION}"),
                            "is not that of the file's name",
                        );
                    }
                    // Earlier releases did not write it.
                    let content = value["metadata"]["annotations"][objects::CONTENT_ANNOTATION].as_str();
                    if content.is_some_and(|content| content != self.content_of(&driver, &data)) {
                        self.problem(
                            path,
                            0,
                            "data",
                            "this or the chart is not what the digest says; a driver never changes, another version gets another digest",
                        );
                    }
                    self.drivers.insert(digest, driver);
                }
            }
        }
    }

    /// Digest of a driver's definition and its chart as they are here.
    fn content_of(&self, driver: &Driver, definition: &BTreeMap<String, String>) -> String {
        let folder = driver.chart_folder().unwrap_or_default();
        let there = format!("{}/", layout::chart_folder(driver.name(), &driver.digest));
        let definition = definition.iter().filter(|(name, _)| [DRIVER_FILE, VALUES_FILE].contains(&name.as_str()));
        let definition = definition.map(|(name, text)| (name.clone(), text.as_str()));
        let chart = self.files.iter().filter_map(|(path, text)| {
            let path = path.strip_prefix(&there)?;
            Some((format!("{folder}/{path}"), text.as_str()))
        });
        objects::content_digest(definition.chain(chart))
    }

    /// Every environment has its file, and every shard an object that keeps it from being empty.
    fn environments(&mut self) {
        let mut shards = BTreeSet::new();
        for path in self.files.keys() {
            if let ["environments", environment, shard, _, ..] = path.split('/').collect::<Vec<_>>().as_slice() {
                shards.insert(((*environment).to_owned(), (*shard).to_owned()));
            }
        }
        for (environment, shard) in shards {
            let file = format!("cluster/environments/{environment}.yaml");
            if environment.parse::<EnvironmentId>().is_ok() && !self.files.contains_key(&file) {
                self.problem(&file, 0, "", "is missing: nothing applies the deployments of this environment");
            }
            let keep = format!("environments/{environment}/{shard}/keep.yaml");
            if !self.files.contains_key(&keep) {
                self.problem(&keep, 0, "", "is missing: a folder without any object would make Flux fail");
            }
        }
        for (path, text) in self.files.iter().filter(|(path, _)| path.starts_with("cluster/")) {
            if text.trim().is_empty() && path.ends_with(".yaml") {
                self.problem(path, 0, "", "is empty: Flux removes what was in it");
            }
        }
    }

    fn document(&mut self, path: &str, text: &str) {
        let is_yaml = path.ends_with(".yaml") || path.ends_with(".yml");
        let Some((environment, _, deployment, file)) = place(path) else {
            self.other(path, text, is_yaml);
            return;
        };
        if file != layout::DEPLOYMENT_FILE {
            // Secrets are looked at by themselves.
            self.other(path, text, is_yaml && file != layout::SECRETS_FILE);
            return;
        }
        if text.trim().is_empty() {
            self.problem(
                path,
                0,
                "",
                "is empty: Flux removes the deployment; remove the file, or delete the deployment",
            );
            return;
        }
        let value: Value = match yaml::from_str(text) {
            Ok(value) => value,
            Err(error) => {
                self.problem(path, error.line, "", error.message);
                return;
            }
        };
        let lines = Lines::of(text).ok();
        let line = |field: &str| {
            let path: Vec<Segment> = field.split('.').map(|part| Segment::Key(part.to_owned())).collect();
            lines.as_ref().map_or(0, |lines| lines.line(&path))
        };
        self.report.deployments += 1;
        let before = self.report.problems.len();
        for (field, wanted) in [("apiVersion", "styrmin.io/v1alpha1"), ("kind", "StyrminDeployment")] {
            if value[field] != wanted {
                self.problem(path, line(field), field, format!("is {}, not \"{wanted}\"", shown(&value[field])));
            }
        }
        for (pointer, message) in schema_problems(&value) {
            let field = pointer.trim_start_matches('/').replace('/', ".");
            self.problem(path, line(&field), &field, message);
        }
        if self.report.problems.len() > before {
            return;
        }
        let spec: StyrminDeploymentSpec = match serde_json::from_value(value["spec"].clone()) {
            Ok(spec) => spec,
            Err(error) => {
                self.problem(path, line("spec"), "spec", error.to_string());
                return;
            }
        };
        let (Ok(environment), Ok(folder)) = (environment.parse::<EnvironmentId>(), deployment.parse::<DeploymentId>())
        else {
            self.problem(path, 0, "", "does not lie in environments/<environment>/<shard>/<deployment>");
            return;
        };
        if spec.deployment_id != folder {
            let message = format!("is {}, but the folder is {folder}'s", spec.deployment_id);
            self.problem(path, line("spec.deploymentId"), "spec.deploymentId", message);
        }
        for (field, is, wanted) in [
            ("metadata.name", &value["metadata"]["name"], spec.deployment_id.object_name()),
            ("metadata.namespace", &value["metadata"]["namespace"], environment.namespace()),
        ] {
            if *is != wanted.as_str() {
                self.problem(path, line(field), field, format!("is {}, not \"{wanted}\"", shown(is)));
            }
        }
        let sequence = value["metadata"]["annotations"][SEQUENCE_ANNOTATION].as_str();
        if sequence.and_then(|text| text.parse::<u64>().ok()).is_none_or(|number| number == 0) {
            let field = "metadata.annotations";
            self.problem(
                path,
                line(field),
                &format!("{field}.{SEQUENCE_ANNOTATION}"),
                "is no sequence: 1 or more, in quotes",
            );
        }
        let size = canonical::to_string(&spec.context).len();
        if size > context::SIZE_MAX {
            let message = format!("has {size} bytes, at most {} are possible", context::SIZE_MAX);
            self.problem(path, line("spec.context"), "spec.context", message);
        }
        self.driver_of(path, &spec, line("spec.driver"));
        if let Some((other, _)) = self.places.get(spec.deployment_id.as_str()) {
            let message = format!("is also in {other}: Flux refuses both");
            self.problem(path, line("spec.deploymentId"), "spec.deploymentId", message);
        }
        self.places.insert(spec.deployment_id.to_string(), (path.to_owned(), spec));
    }

    /// A file that Flux reads, too: it has to be YAML, and no deployment's document.
    fn other(&mut self, path: &str, text: &str, is_yaml: bool) {
        if !is_yaml || path.starts_with("charts/") || path.starts_with("cluster/drivers/") {
            return;
        }
        for part in text.split("\n---\n") {
            let line = 1 + text[..text.find(part).unwrap_or_default()].lines().count() as u64;
            match yaml::from_str::<Value>(part) {
                Ok(value) if value["kind"] == "StyrminDeployment" => {
                    let message = format!(
                        "a StyrminDeployment lies in environments/<environment>/<shard>/<deployment>/{}, and nowhere else",
                        layout::DEPLOYMENT_FILE
                    );
                    self.problem(path, line, "kind", message);
                }
                Ok(_) => {}
                Err(error) => self.problem(path, line + error.line.saturating_sub(1), "", error.message),
            }
        }
    }

    /// The driver is there, and can render its values.
    fn driver_of(&mut self, path: &str, spec: &StyrminDeploymentSpec, line: u64) {
        let file = layout::driver_file(&spec.driver.name, &spec.driver.digest);
        match self.drivers.get(&spec.driver.digest) {
            None => self.problem(
                path,
                line,
                "spec.driver.digest",
                format!("there is no {file}: the deployment would wait for it"),
            ),
            Some(driver) => {
                if let Err(error) = objects::helm_values(spec, driver, &|reference| reference.fingerprint.clone()) {
                    let message = format!("the driver cannot render its values with this: {error}");
                    self.problem(path, 0, "spec.context", message);
                }
            }
        }
    }

    /// Every secret that a context names is in the file beside it, encrypted.
    fn secrets(&mut self) {
        let mut wanted: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
        for (path, spec) in self.places.values() {
            let parameters = spec.context["parameters"].as_object().into_iter().flatten();
            let ours = parameters.filter_map(|(_, value)| SecretRef::read(value)).filter(|one| !one.is_outside());
            let keys = ours.map(|one| (one.key, one.fingerprint)).collect();
            let file = path.replace(layout::DEPLOYMENT_FILE, layout::SECRETS_FILE);
            wanted.insert(file, keys);
        }
        let files = self.files;
        for (path, text) in files.iter().filter(|(path, _)| path.ends_with(&format!("/{}", layout::SECRETS_FILE))) {
            let file: Value = match yaml::from_str(text) {
                Ok(value) => value,
                Err(error) => {
                    self.problem(path, error.line, "", error.message);
                    continue;
                }
            };
            for section in ["stringData", "data"] {
                for (key, value) in file[section].as_object().into_iter().flatten() {
                    // What it holds is not shown.
                    // SOPS leaves an empty value as it is.
                    if !value.as_str().is_some_and(|text| text.is_empty() || text.starts_with("ENC[")) {
                        self.problem(
                            path,
                            0,
                            &format!("{section}.{key}"),
                            "is not encrypted; take it out of the history, and set another secret",
                        );
                    }
                    let named = wanted.entry(path.clone()).or_default().remove(key);
                    let is = value_of(&file, key);
                    if named.is_some_and(|named| is.is_some_and(|is| is != named)) {
                        self.problem(
                            path,
                            0,
                            &format!("{section}.{key}"),
                            "is another value than the document beside it names; the two files go back together",
                        );
                    }
                }
            }
            if file["sops"].is_null() {
                self.problem(path, 0, "sops", "is missing: Flux could not decrypt it");
            }
        }
        for (path, keys) in wanted {
            for key in keys.into_keys() {
                self.problem(
                    &path,
                    0,
                    &format!("stringData.{key}"),
                    "is missing: the deployment would wait for this secret",
                );
            }
        }
    }

    /// What differs from `base`.
    fn against(&mut self, base: &Files) {
        let files = self.files;
        let paths: BTreeSet<&String> = base.keys().chain(files.keys()).collect();
        for path in paths {
            let (old, new) = (base.get(path), files.get(path));
            if old == new {
                continue;
            }
            let Some((_, _, id, layout::DEPLOYMENT_FILE)) = place(path) else {
                let verb = match (old, new) {
                    (None, _) => "adds",
                    (_, None) => "removes",
                    _ => "changes",
                };
                self.report.changes.push(format!("{verb} {path}"));
                continue;
            };
            let read = |text: Option<&String>| {
                let value: Value = yaml::from_str(text?).ok()?;
                let spec: StyrminDeploymentSpec = serde_json::from_value(value["spec"].clone()).ok()?;
                let name = spec.context["deployment"]["name"].as_str().unwrap_or(id).to_owned();
                let sequence = spec::read_committed(text?).ok()?.sequence;
                Some((name, sequence, spec))
            };
            let moved = || self.places.get(id).filter(|(now, _)| now != path).map(|(now, _)| now.clone());
            let lines = match (read(old), read(new)) {
                (Some((name, ..)), None) if new.is_none() => match moved() {
                    Some(now) => vec![format!("moves deployment {name} to {now}, where it does not belong")],
                    None => {
                        vec![format!("removes deployment {name}; the application runs on until somebody confirms it")]
                    }
                },
                (Some((name, ..)), None) => vec![format!("breaks deployment {name}")],
                (None, Some((name, _, spec))) => {
                    vec![format!("adds deployment {name} ({} {})", spec.driver.name, spec.application_version)]
                }
                (Some((name, before, old)), Some((_, now, new))) => {
                    let mut lines = vec![if now < before {
                        format!("takes deployment {name} back from change {before} to change {now}")
                    } else {
                        format!("changes deployment {name}")
                    }];
                    lines.extend(diff::words(&old, &new).into_iter().map(|line| format!("  {line}")));
                    lines
                }
                (None, None) => vec![format!("changes {path}")],
            };
            self.report.changes.extend(lines);
        }
    }
}

/// The fingerprint of a key, as the secrets file has it for reviewers.
fn value_of<'a>(file: &'a Value, key: &str) -> Option<&'a str> {
    file["metadata"]["annotations"][format!("fingerprint.styrmin.io/{key}")].as_str()
}

fn shown(value: &Value) -> String {
    if value.is_null() { "missing".to_owned() } else { value.to_string() }
}

/// The schema that the API server checks a StyrminDeployment with.
static SCHEMA: LazyLock<Option<jsonschema::Validator>> = LazyLock::new(|| {
    let crd = spec::crd();
    let schema = crd.pointer("/spec/versions/0/schema/openAPIV3Schema")?;
    jsonschema::validator_for(schema).ok()
});

/// Pointer and message of what the schema of a StyrminDeployment refuses.
#[must_use]
pub fn schema_problems(value: &Value) -> Vec<(String, String)> {
    let Some(schema) = &*SCHEMA else { return Vec::new() };
    let errors = schema.iter_errors(value);
    errors.map(|error| (error.instance_path().as_str().to_owned(), error.to_string())).collect()
}
