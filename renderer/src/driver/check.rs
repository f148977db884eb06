//! Decides whether a folder is a good driver, and says with file, line and field what is not.

use super::format::{Chart, DriverFile, Parameter, ParameterKind, ServiceKind, Step};
use super::{DRIVER_FILE, VALUES_FILE, supports};
use crate::names;
use crate::yaml::{self, Lines, Segment, display_path};
use crate::{canonical, values};
use semver::{Version, VersionReq};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Most bytes of all files of a driver together: it travels as one ConfigMap and one chart folder.
pub const FOLDER_MAX: usize = 1 << 20;
/// Most files of a driver.
pub const FILES_MAX: usize = 200;
/// Most bytes of `driver.styrmin.yml` and of `values.styrmin.yml`.
pub const FILE_MAX: usize = 256 << 10;

/// A problem of a file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileProblem {
    /// File within the folder that was checked.
    pub file: String,
    /// 1-based line; 0 when the file as a whole is meant.
    pub line: u64,
    /// Field, as people write it.
    pub field: String,
    /// What is wrong and what to do.
    pub message: String,
}

impl fmt::Display for FileProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        if !self.field.is_empty() {
            write!(f, ": {}", self.field)?;
        }
        write!(f, ": {}", self.message)
    }
}

/// A driver version that passed every check. Immutable: `digest` is its identity.
#[derive(Debug, Clone)]
pub struct Driver {
    /// Content of `driver.styrmin.yml`.
    pub file: DriverFile,
    /// Tree of `values.styrmin.yml`; empty when there is none.
    pub values: Value,
    /// All files, by path within the folder.
    pub files: BTreeMap<String, String>,
    /// `sha256:…` over all files.
    pub digest: String,
    /// `spec.version`.
    pub version: Version,
    /// `spec.supported_versions`.
    pub supported: VersionReq,
}

impl Driver {
    /// Checks the files of a folder as a whole.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn from_files(files: BTreeMap<String, String>) -> Result<Self, Vec<FileProblem>> {
        check_sizes(&files)?;
        let Some(text) = files.get(DRIVER_FILE) else {
            return Err(vec![FileProblem {
                file: DRIVER_FILE.into(),
                line: 0,
                field: String::new(),
                message: "is missing; a driver needs it".into(),
            }]);
        };
        let not_yaml = |file: &str, error: yaml::YamlError| {
            vec![FileProblem { file: file.into(), line: error.line, field: String::new(), message: error.message }]
        };
        let file: DriverFile = yaml::from_str(text).map_err(|error| not_yaml(DRIVER_FILE, error))?;
        let lines = Lines::of(text).map_err(|error| not_yaml(DRIVER_FILE, error))?;
        let mut checker = Checker { lines: &lines, problems: Vec::new() };
        let versions = checker.check_file(&file, &files);

        let mut values = Value::Object(serde_json::Map::new());
        let mut problems = checker.problems;
        if let Some(text) = files.get(VALUES_FILE) {
            match yaml::from_str::<Value>(text) {
                Ok(tree) => {
                    problems.extend(check_values(&file, text, &tree));
                    values = tree;
                }
                Err(error) => problems.extend(not_yaml(VALUES_FILE, error)),
            }
        }
        match versions {
            Some((version, supported)) if problems.is_empty() => {
                Ok(Self { digest: digest(&files), file, values, files, version, supported })
            }
            _ => Err(problems),
        }
    }

    /// A driver as its ConfigMap in a cluster holds it: the definition without the chart's files,
    /// which were checked when it was loaded, and the digest of the whole.
    ///
    /// # Errors
    /// What cannot be read, as for [`Self::from_files`].
    pub fn from_definition(files: BTreeMap<String, String>, digest: &str) -> Result<Self, Vec<FileProblem>> {
        let problem = |file: &str, line: u64, field: &str, message: String| {
            vec![FileProblem { file: file.into(), line, field: field.into(), message }]
        };
        let text = files.get(DRIVER_FILE).ok_or_else(|| problem(DRIVER_FILE, 0, "", "is missing".into()))?;
        let file: DriverFile =
            yaml::from_str(text).map_err(|error| problem(DRIVER_FILE, error.line, "", error.message))?;
        let values = match files.get(VALUES_FILE) {
            Some(text) => yaml::from_str(text).map_err(|error| problem(VALUES_FILE, error.line, "", error.message))?,
            None => Value::Object(serde_json::Map::new()),
        };
        let version = file.spec.version.parse();
        let version: Version =
            version.map_err(|_| problem(DRIVER_FILE, 0, "spec.version", "is no semantic version".into()))?;
        let supported = file.spec.supported_versions.parse();
        let supported: VersionReq =
            supported.map_err(|_| problem(DRIVER_FILE, 0, "spec.supported_versions", "is no range".into()))?;
        Ok(Self { file, values, files, digest: digest.to_owned(), version, supported })
    }

    /// `metadata.name`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.file.metadata.name
    }

    /// The parameter called `name`.
    #[must_use]
    pub fn parameter(&self, name: &str) -> Option<&Parameter> {
        self.file.spec.parameters.iter().find(|parameter| parameter.name == name)
    }

    /// Folder of the driver's own chart, when it has one.
    #[must_use]
    pub fn chart_folder(&self) -> Option<&str> {
        local_folder(&self.file.spec.helm.main)
    }

    /// The files of the driver's own chart, by path within the chart.
    pub fn chart_files(&self) -> impl Iterator<Item = (&str, &str)> {
        let prefix = self.chart_folder().map(|folder| format!("{folder}/"));
        self.files.iter().filter_map(move |(path, content)| {
            path.strip_prefix(prefix.as_deref()?).map(|path| (path, content.as_str()))
        })
    }
}

/// The digest of a driver's files: paths and contents, length-prefixed.
fn digest(files: &BTreeMap<String, String>) -> String {
    let mut bytes = Vec::new();
    for (path, content) in files {
        bytes.extend(format!("{} {}\n{path}{content}", path.len(), content.len()).into_bytes());
    }
    canonical::digest_bytes(&bytes)
}

fn local_folder(chart: &Chart) -> Option<&str> {
    (!chart.location.contains("://")).then(|| chart.location.trim_matches('/'))
}

fn check_sizes(files: &BTreeMap<String, String>) -> Result<(), Vec<FileProblem>> {
    let mut problems = Vec::new();
    let mut problem = |file: &str, message: String| {
        problems.push(FileProblem { file: file.into(), line: 0, field: String::new(), message });
    };
    let total: usize = files.values().map(String::len).sum();
    if total > FOLDER_MAX {
        problem("", format!("all files together have {total} bytes, at most {FOLDER_MAX} are possible"));
    }
    if files.len() > FILES_MAX {
        problem("", format!("has {} files, at most {FILES_MAX} are possible", files.len()));
    }
    for name in [DRIVER_FILE, VALUES_FILE] {
        let size = files.get(name).map_or(0, String::len);
        if size > FILE_MAX {
            problem(name, format!("has {size} bytes, at most {FILE_MAX} are possible"));
        }
        if let Some(found) = files.get(name).and_then(|text| yaml::uncarriable(text)) {
            problem(name, format!("contains the character U+{:04X}, which Flux cannot carry", u32::from(found)));
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}

struct Checker<'a> {
    lines: &'a Lines,
    problems: Vec<FileProblem>,
}

/// A path below `spec`.
fn at(parts: &[&dyn ToSegment]) -> Vec<Segment> {
    std::iter::once(Segment::Key("spec".into())).chain(parts.iter().map(|part| part.segment())).collect()
}

trait ToSegment {
    fn segment(&self) -> Segment;
}

impl ToSegment for &str {
    fn segment(&self) -> Segment {
        Segment::Key((*self).to_owned())
    }
}

impl ToSegment for String {
    fn segment(&self) -> Segment {
        Segment::Key(self.clone())
    }
}

impl ToSegment for usize {
    fn segment(&self) -> Segment {
        Segment::Index(*self)
    }
}

impl Checker<'_> {
    fn problem(&mut self, path: &[Segment], message: impl Into<String>) {
        self.problems.push(FileProblem {
            file: DRIVER_FILE.into(),
            line: self.lines.line(path),
            field: display_path(path),
            message: message.into(),
        });
    }

    fn rule(&mut self, path: &[Segment], result: Result<(), String>) {
        if let Err(message) = result {
            self.problem(path, message);
        }
    }

    fn check_file(&mut self, file: &DriverFile, files: &BTreeMap<String, String>) -> Option<(Version, VersionReq)> {
        let key = |name: &str| vec![Segment::Key(name.to_owned())];
        if file.api_version != "styrmin.io/v1" {
            self.problem(&key("apiVersion"), "must be styrmin.io/v1");
        }
        if file.kind != "ApplicationDriver" {
            self.problem(&key("kind"), "must be ApplicationDriver");
        }
        let name = [Segment::Key("metadata".into()), Segment::Key("name".into())];
        self.rule(&name, names::dns_label(&file.metadata.name, 40));

        let spec = &file.spec;
        let version = Version::parse(&spec.version)
            .map_err(|error| format!("\"{}\" is not a semantic version such as 1.2.0: {error}", spec.version));
        let supported = VersionReq::parse(&spec.supported_versions)
            .map_err(|error| format!("\"{}\" is not a range such as >=0.1, <1.0: {error}", spec.supported_versions));
        if let Err(message) = &version {
            self.problem(&at(&[&"version"]), message.clone());
        }
        if let Err(message) = &supported {
            self.problem(&at(&[&"supported_versions"]), message.clone());
        }
        if let (Some(default), Ok(supported)) = (&spec.default_version, &supported)
            && !supports(supported, default)
        {
            self.problem(&at(&[&"default_version"]), "is not among supported_versions");
        }
        self.check_chart(&spec.helm.main, files);
        self.check_components(file);
        self.check_services(file);
        self.check_parameters(&spec.parameters);
        self.check_actions(file);
        self.check_documentation(file);
        Some((version.ok()?, supported.ok()?))
    }

    fn check_chart(&mut self, chart: &Chart, files: &BTreeMap<String, String>) {
        let location = at(&[&"helm", &"main", &"location"]);
        let version = at(&[&"helm", &"main", &"version"]);
        if Version::parse(&chart.version).is_err() {
            self.problem(&version, format!("\"{}\" is not an exact version such as 1.2.0", chart.version));
        }
        if let Some(folder) = local_folder(chart) {
            #[derive(serde::Deserialize)]
            struct ChartFile {
                version: String,
            }
            if folder.split('/').any(|part| matches!(part, "" | "." | "..")) {
                self.problem(&location, "must be a folder inside the driver's own");
                return;
            }
            let path = format!("{folder}/Chart.yaml");
            match files.get(&path).map(|text| yaml::from_str::<ChartFile>(text)) {
                None => self.problem(&location, format!("there is no {path} in the driver's folder")),
                Some(Err(error)) => self.problem(&location, format!("{path}: {error}")),
                Some(Ok(found)) if found.version != chart.version => self.problem(
                    &version,
                    format!("is {} but {path} says {}; they must agree", chart.version, found.version),
                ),
                Some(Ok(_)) => {}
            }
            return;
        }
        match chart.location.split_once("://") {
            Some(("oci", _)) => {
                if chart.chart.is_some() {
                    self.problem(&at(&[&"helm", &"main", &"chart"]), "belongs into location when that is oci://");
                }
            }
            Some(("http" | "https", _)) => {
                if chart.chart.is_none() {
                    self.problem(&location, "is a repository; name the chart in spec.helm.main.chart");
                }
            }
            _ => self.problem(&location, "must be a folder of the driver, oci://… or https://…"),
        }
    }

    fn check_components(&mut self, file: &DriverFile) {
        for (name, component) in &file.spec.components {
            let path = at(&[&"components", name]);
            // `allow-environment-to-<component>` must stay a name, and hostnames stay short.
            self.rule(&path, names::dns_label(name, 30));
            let label = at(&[&"components", name, &"identifier", &"label"]);
            if component.identifier.label.is_empty() {
                self.problem(&label, "must name at least one label; it finds the component's pods");
            }
            for value in component.identifier.label.values() {
                self.rule(&label, names::label_value(value));
            }
            let mut seen = BTreeSet::new();
            for (index, container) in component.containers.iter().enumerate() {
                let path = at(&[&"components", name, &"containers", &index]);
                self.rule(&path, names::dns_label(container, names::LABEL_MAX));
                if !seen.insert(container) {
                    self.problem(&path, format!("\"{container}\" is listed twice"));
                }
            }
        }
    }

    fn component_exists(&mut self, file: &DriverFile, path: &[Segment], name: &str) -> bool {
        let exists = file.spec.components.contains_key(name);
        if !exists {
            self.problem(path, format!("\"{name}\" is not one of spec.components"));
        }
        exists
    }

    fn check_services(&mut self, file: &DriverFile) {
        let mut seen = BTreeSet::new();
        for (index, service) in file.spec.services.iter().enumerate() {
            let name = at(&[&"services", &index, &"name"]);
            // The hostname's first label is <service>-<deployment id>.
            self.rule(&name, names::dns_label(&service.name, names::LABEL_MAX - names::ID_LENGTH - 1));
            if !seen.insert(&service.name) {
                self.problem(&name, format!("\"{}\" is used twice", service.name));
            }
            if service.port == 0 {
                self.problem(&at(&[&"services", &index, &"port"]), "must be between 1 and 65535");
            }
            if service.scope == super::format::Scope::External && service.kind != ServiceKind::Http {
                self.problem(
                    &at(&[&"services", &index, &"scope"]),
                    "only services of kind http can be external; an Ingress carries nothing else",
                );
            }
            self.component_exists(file, &at(&[&"services", &index, &"component"]), &service.component);
        }
    }

    fn check_parameters(&mut self, parameters: &[Parameter]) {
        let mut seen = BTreeSet::new();
        for (index, parameter) in parameters.iter().enumerate() {
            let field = |name: &'static str| at(&[&"parameters", &index, &name]);
            let name = &parameter.name;
            let valid = name.starts_with(|c: char| c.is_ascii_lowercase())
                && name.len() <= 60
                && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
            if !valid {
                self.problem(
                    &field("name"),
                    format!("\"{name}\" must be lower-case letters, digits and '_', a letter first, at most 60"),
                );
            }
            if !seen.insert(name) {
                self.problem(&field("name"), format!("\"{name}\" is used twice"));
            }
            match (parameter.kind, parameter.values.is_empty()) {
                (ParameterKind::Enum, true) => self.problem(&field("kind"), "an enum needs values"),
                (ParameterKind::Enum, false) | (_, true) => {}
                (_, false) => self.problem(&field("values"), "only an enum has values"),
            }
            if parameter.secret && parameter.default.is_some() {
                self.problem(&field("default"), "a secret has no default: everybody could read it");
            }
            if parameter.secret && parameter.kind != ParameterKind::String {
                self.problem(&field("kind"), "a secret must be a string");
            }
            match parameter_validator(parameter) {
                Err(message) => self.problem(&field("schema"), message),
                Ok(validator) => {
                    if let Some(default) = &parameter.default
                        && let Err(message) = check_parameter(parameter, &validator, default)
                        && !default.is_null()
                    {
                        self.problem(&field("default"), message);
                    }
                }
            }
        }
    }

    fn check_actions(&mut self, file: &DriverFile) {
        let mut seen = BTreeSet::new();
        for (index, action) in file.spec.actions.iter().enumerate() {
            let name = at(&[&"actions", &index, &"name"]);
            self.rule(&name, names::dns_label(&action.name, 40));
            if !seen.insert(&action.name) {
                self.problem(&name, format!("\"{}\" is used twice", action.name));
            }
            if action.steps.is_empty() {
                self.problem(&at(&[&"actions", &index, &"steps"]), "must have at least one step");
            }
            for (step_index, step) in action.steps.iter().enumerate() {
                let path = at(&[&"actions", &index, &"steps", &step_index]);
                let (components, timeout): (Vec<&str>, u32) = match step {
                    Step::RunJob(job) => (vec![&job.component], job.timeout_seconds),
                    Step::Execute(execute) => (vec![&execute.component], execute.timeout_seconds),
                    Step::StopComponents(names) | Step::StartComponents(names) => {
                        (names.iter().map(String::as_str).collect(), 1)
                    }
                    Step::Wait(wait) => (Vec::new(), wait.seconds),
                };
                for component in components {
                    if self.component_exists(file, &path, component)
                        && let Step::Execute(execute) = step
                        && let Some(container) = &execute.container
                        && !file.spec.components[component].containers.contains(container)
                    {
                        self.problem(
                            &path,
                            format!("\"{container}\" is not one of the containers of component \"{component}\""),
                        );
                    }
                }
                if !(1..=86_400).contains(&timeout) {
                    self.problem(&path, "its time must be between 1 second and a day");
                }
            }
        }
    }

    fn check_documentation(&mut self, file: &DriverFile) {
        for (index, variable) in file.spec.env_vars.iter().enumerate() {
            self.rule(&at(&[&"env_vars", &index, &"name"]), names::env_var(&variable.name));
            for component in &variable.components {
                self.component_exists(file, &at(&[&"env_vars", &index, &"components"]), component);
            }
        }
        for (index, permitted) in file.spec.container_overrides.iter().enumerate() {
            let path = at(&[&"container_overrides", &index]);
            if self.component_exists(file, &path, &permitted.component)
                && !file.spec.components[&permitted.component].containers.contains(&permitted.container)
            {
                self.problem(&path, format!("\"{}\" is not one of its containers", permitted.container));
            }
        }
    }
}

fn check_values(file: &DriverFile, text: &str, tree: &Value) -> Vec<FileProblem> {
    let lines = match Lines::of(text) {
        Ok(lines) => lines,
        Err(error) => {
            return vec![FileProblem {
                file: VALUES_FILE.into(),
                line: error.line,
                field: String::new(),
                message: error.message,
            }];
        }
    };
    let problem = |path: &[Segment], message: String| FileProblem {
        file: VALUES_FILE.into(),
        line: lines.line(path),
        field: display_path(path),
        message,
    };
    if !tree.is_object() {
        return vec![problem(&[], "must be a mapping".into())];
    }
    match values::check(tree) {
        Err(errors) => errors.into_iter().map(|error| problem(&error.path, error.message)).collect(),
        Ok(uses) => uses
            .into_iter()
            .filter_map(|(path, name)| unknown_name(file, &name).map(|message| problem(&path, message)))
            .collect(),
    }
}

/// What is wrong with reading `name` (`parameters.image`), if anything.
fn unknown_name(file: &DriverFile, name: &str) -> Option<String> {
    let mut parts = name.split('.');
    let root = parts.next().unwrap_or_default();
    if !crate::context::ROOTS.contains(&root) {
        return Some(format!("reads \"{name}\"; the context has {}", crate::context::ROOTS.join(", ")));
    }
    let child = parts.next()?;
    let spec = &file.spec;
    let known = match root {
        "parameters" => spec.parameters.iter().any(|parameter| parameter.name == child),
        "components" => spec.components.contains_key(child),
        "services" => spec.services.iter().any(|service| service.name == child),
        _ => true,
    };
    (!known).then(|| format!("reads \"{name}\", but driver.styrmin.yml declares no such one of spec.{root}"))
}

/// A validator for the parameter's own schema, if it has one. References to elsewhere fail: no
/// retriever is compiled in, so a schema can read neither files nor addresses.
fn parameter_validator(parameter: &Parameter) -> Result<Option<jsonschema::Validator>, String> {
    parameter
        .schema
        .as_ref()
        .map(|schema| jsonschema::validator_for(schema).map_err(|error| format!("is not a JSON Schema: {error}")))
        .transpose()
}

fn check_parameter(
    parameter: &Parameter,
    validator: &Option<jsonschema::Validator>,
    value: &Value,
) -> Result<(), String> {
    let fits = match parameter.kind {
        ParameterKind::String => value.is_string(),
        ParameterKind::Integer => value.is_i64() || value.is_u64(),
        ParameterKind::Number => value.is_number(),
        ParameterKind::Boolean => value.is_boolean(),
        ParameterKind::Array => value.is_array(),
        ParameterKind::Object => value.is_object(),
        ParameterKind::Enum => {
            if parameter.values.contains(value) {
                true
            } else {
                let choices: Vec<String> = parameter.values.iter().map(ToString::to_string).collect();
                return Err(format!("must be one of {}", choices.join(", ")));
            }
        }
    };
    if !fits {
        return Err(format!("must be of kind {}", kind_name(parameter.kind)));
    }
    if let Some(validator) = validator
        && let Some(error) = validator.iter_errors(value).next()
    {
        // jsonschema's messages quote the value: never for a secret.
        let detail = if parameter.secret { error.masked().to_string() } else { error.to_string() };
        let place = error.instance_path().as_str();
        return Err(if place.is_empty() { detail } else { format!("{detail} (at {place})") });
    }
    Ok(())
}

fn kind_name(kind: ParameterKind) -> &'static str {
    match kind {
        ParameterKind::String => "string",
        ParameterKind::Integer => "integer",
        ParameterKind::Number => "number",
        ParameterKind::Boolean => "boolean",
        ParameterKind::Enum => "enum",
        ParameterKind::Array => "array",
        ParameterKind::Object => "object",
    }
}

impl Parameter {
    /// Checks a value that somebody set. Messages never contain a secret.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self, value: &Value) -> Result<(), String> {
        // A default of null says that the parameter may be unset.
        if value.is_null() && self.default == Some(Value::Null) {
            return Ok(());
        }
        check_parameter(self, &parameter_validator(self)?, value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"apiVersion: styrmin.io/v1
kind: ApplicationDriver
metadata:
  name: web
spec:
  version: 1.0.0
  supported_versions: ">=0.1, <2"
  helm:
    main: {location: chart, version: 1.0.0}
  components:
    web:
      identifier: {label: {app.kubernetes.io/component: web}}
      containers: [web]
  services:
  - {name: http, kind: http, scope: external, port: 80, component: web}
  parameters:
  - {name: image, label: Image, kind: string, default: nginx, schema: {minLength: 1}}
  - {name: password, label: Password, kind: string, secret: true, schema: {minLength: 8}}
"#;

    fn files(driver: &str, values: &str) -> BTreeMap<String, String> {
        BTreeMap::from([
            (DRIVER_FILE.to_owned(), driver.to_owned()),
            (VALUES_FILE.to_owned(), values.to_owned()),
            ("chart/Chart.yaml".to_owned(), "name: web\nversion: 1.0.0\n".to_owned()),
        ])
    }

    fn problems(driver: &str, values: &str) -> String {
        let found = Driver::from_files(files(driver, values)).unwrap_err();
        found.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn a_good_driver_loads_and_its_digest_follows_its_content() {
        let one = Driver::from_files(files(GOOD, "a: ${{ parameters.image }}\n")).unwrap();
        let two = Driver::from_files(files(GOOD, "b: ${{ parameters.image }}\n")).unwrap();
        assert_eq!((one.name(), one.version.to_string().as_str()), ("web", "1.0.0"));
        assert_ne!(one.digest, two.digest);
        assert_eq!(one.chart_files().map(|(path, _)| path).collect::<Vec<_>>(), ["Chart.yaml"]);
    }

    #[test]
    fn every_problem_names_file_line_and_field() {
        let cases = [
            ("version: 1.0.0\n", "version: one\n", "driver.styrmin.yml:6: spec.version: "),
            (">=0.1, <2", "about 2", "driver.styrmin.yml:7: spec.supported_versions: "),
            (
                "location: chart",
                "location: charts",
                "driver.styrmin.yml:9: spec.helm.main.location: there is no charts/Chart.yaml",
            ),
            ("location: chart", "location: https://x", "spec.helm.main.location: is a repository"),
            ("name: http,", "name: Http,", "driver.styrmin.yml:15: spec.services[0].name: "),
            (
                "port: 80, component: web}",
                "port: 80, component: db}",
                "spec.services[0].component: \"db\" is not one of spec.components",
            ),
            ("port: 80", "port: 0", "driver.styrmin.yml:15: spec.services[0].port: "),
            (
                "default: nginx",
                "default: 3",
                "driver.styrmin.yml:17: spec.parameters[0].default: must be of kind string",
            ),
            ("secret: true", "secret: true, default: x", "spec.parameters[1].default: a secret has no default"),
            ("schema: {minLength: 1}", "schema: {$ref: 'https://example.com/x'}", "spec.parameters[0].schema: "),
            ("kind: http", "kind: udp", "driver.styrmin.yml:15: "),
            ("  services:", "  servces: []\n  services:", "driver.styrmin.yml:14: "),
            ("kind: ApplicationDriver", "kind: Driver", "driver.styrmin.yml:2: kind: must be ApplicationDriver"),
        ];
        for (from, to, expected) in cases {
            assert!(GOOD.contains(from), "{from}");
            let found = problems(&GOOD.replacen(from, to, 1), "{}\n");
            assert!(found.contains(expected), "{to}: {found}");
        }
        let values = [
            ("a: 1\nb: ${{ parameters.imag }}\n", "values.styrmin.yml:2: b: reads \"parameters.imag\""),
            ("a:\n- ${{ 1 + }}\n", "values.styrmin.yml:2: a[0]: syntax error"),
            ("a: ${{ secrets.x }}\n", "values.styrmin.yml:1: a: reads \"secrets.x\"; the context has"),
            ("- a\n", "values.styrmin.yml:1: must be a mapping"),
            ("a: 1\na: 2\n", "values.styrmin.yml:2: "),
        ];
        for (text, expected) in values {
            let found = problems(GOOD, text);
            assert!(found.contains(expected), "{text}: {found}");
        }
    }

    #[test]
    fn messages_about_a_secret_do_not_contain_it() {
        let driver = Driver::from_files(files(GOOD, "{}\n")).unwrap();
        let message = driver.parameter("password").unwrap().check(&Value::from("hunter2")).unwrap_err();
        assert!(!message.contains("hunter2"), "{message}");
    }
}
