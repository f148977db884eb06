//! What a deployment's files in the repository say, against what was written there. Pure.

use crate::repository::Content;
use crate::store::{EditKind, Instance};
use serde_json::Value;
use styrmin_renderer::context::SecretRef;
use styrmin_renderer::names::EnvironmentId;
use styrmin_renderer::spec::{self, StyrminDeploymentSpec};
use styrmin_renderer::yaml;

/// The files of one deployment, as far as they were found to differ.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::changes) struct Files<'a> {
    /// `styrmindeployment.yaml`.
    pub(in crate::changes) document: Option<&'a Content>,
    /// `secrets.sops.yaml`.
    pub(in crate::changes) secrets: Option<&'a Content>,
    /// A StyrminDeployment of the same deployment lies somewhere else.
    pub(in crate::changes) elsewhere: bool,
}

/// What was done.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::changes) enum Verdict {
    /// Nothing: they are as we wrote them.
    Ours,
    /// Other content than that of an instance.
    Changed {
        /// What the file says.
        found: Box<StyrminDeploymentSpec>,
        /// More than its spec differs.
        beside: bool,
    },
    /// The content of an earlier instance.
    Reverted,
    /// The file is gone, or asks for the end.
    Removed,
    /// The file of a removed deployment is there again.
    Returned,
    /// It is gone here, and lies elsewhere.
    Moved,
    /// It is empty.
    Emptied,
    /// It cannot be read, or is another object.
    Broken(String),
    /// Only the secrets differ.
    Secrets,
}

impl Verdict {
    /// Its kind; `None`: nothing was done.
    pub(in crate::changes) fn kind(&self) -> Option<EditKind> {
        Some(match self {
            Self::Ours => return None,
            Self::Changed { .. } => EditKind::Changed,
            Self::Reverted => EditKind::Reverted,
            Self::Removed => EditKind::Removed,
            Self::Returned => EditKind::Returned,
            Self::Moved => EditKind::Moved,
            Self::Emptied => EditKind::Emptied,
            Self::Broken(_) => EditKind::Broken,
            Self::Secrets => EditKind::Secrets,
        })
    }
}

/// The instance that a document names, whoever wrote it.
pub(in crate::changes) fn named(document: &str) -> Option<String> {
    spec::read_committed(document).ok().map(|file| file.instance_id)
}

/// What a document asks for, if it can be read.
pub(in crate::changes) fn spec_of(document: &str) -> Option<StyrminDeploymentSpec> {
    let value: Value = yaml::from_str(document).ok()?;
    serde_json::from_value(value["spec"].clone()).ok()
}

/// Whether a document holds something else where a secret's reference belongs.
pub(in crate::changes) fn shows_a_secret(written: &StyrminDeploymentSpec, found: &StyrminDeploymentSpec) -> bool {
    let parameters = written.context["parameters"].as_object().into_iter().flatten();
    let mut secrets = parameters.filter(|(_, value)| SecretRef::read(value).is_some());
    secrets.any(|(name, _)| {
        let found = &found.context["parameters"][name];
        !found.is_null() && SecretRef::read(found).is_none()
    })
}

/// What was done to the files of a deployment of `environment`. `committed` is what we wrote last, `named` the
/// instance of the deployment that the document names.
pub(in crate::changes) fn verdict(
    environment: &EnvironmentId,
    committed: &Instance,
    named: Option<&Instance>,
    files: Files<'_>,
) -> Verdict {
    let same = |content: &Content, written: Option<&String>| match content {
        Content::Absent => written.is_none(),
        Content::Text(text) => written == Some(text),
        Content::Other => false,
    };
    let secrets_differ = files.secrets.is_some_and(|content| !same(content, committed.secrets_file.as_ref()));
    let document = match files.document {
        Some(content) if !same(content, committed.document.as_ref()) => content,
        _ if secrets_differ => return Verdict::Secrets,
        _ => return Verdict::Ours,
    };
    let text = match document {
        Content::Absent if files.elsewhere => return Verdict::Moved,
        Content::Absent => return Verdict::Removed,
        Content::Other => return Verdict::Broken("it is no text, or too large".to_owned()),
        Content::Text(text) => text,
    };
    if committed.document.is_none() {
        return Verdict::Returned;
    }
    if text.trim().is_empty() {
        return Verdict::Emptied;
    }
    if named.is_some_and(|named| named.id != committed.id && named.document.as_ref() == Some(text)) {
        return Verdict::Reverted;
    }
    let found = match read(text, environment, committed) {
        Ok(found) => found,
        Err(problem) => return Verdict::Broken(problem),
    };
    if found.spec.lifecycle == spec::Lifecycle::Deleting {
        return Verdict::Removed;
    }
    Verdict::Changed { found: Box::new(found.spec), beside: found.beside }
}

struct Found {
    spec: StyrminDeploymentSpec,
    beside: bool,
}

/// Reads an edited document. What makes it another object is a problem: its name, its namespace, its deployment.
fn read(text: &str, environment: &EnvironmentId, committed: &Instance) -> Result<Found, String> {
    let value: Value = yaml::from_str(text).map_err(|error| format!("line {}: {}", error.line, error.message))?;
    let expected = spec::object(&committed.spec, environment, committed.sequence.unsigned_abs());
    for pointer in ["/apiVersion", "/kind", "/metadata/name", "/metadata/namespace", "/spec/deploymentId"] {
        let (is, should) = (value.pointer(pointer), expected.pointer(pointer));
        if is != should {
            let field = pointer.trim_start_matches('/').replace('/', ".");
            let show = |value: Option<&Value>| value.map_or_else(|| "missing".to_owned(), Value::to_string);
            let line = line_of(text, pointer);
            return Err(format!("{line}{field}: is {}, not {}", show(is), show(should)));
        }
    }
    let spec: StyrminDeploymentSpec =
        serde_json::from_value(value["spec"].clone()).map_err(|error| format!("spec: {error}"))?;
    // A sequence is ours to give; the rest of the metadata says what we wrote.
    let metadata = |value: &Value| {
        let mut metadata = value["metadata"].clone();
        if let Some(annotations) = metadata["annotations"].as_object_mut() {
            annotations.remove(spec::SEQUENCE_ANNOTATION);
        }
        metadata
    };
    Ok(Found { beside: metadata(&value) != metadata(&expected), spec })
}

fn line_of(text: &str, pointer: &str) -> String {
    let path: Vec<yaml::Segment> = pointer.split('/').skip(1).map(|part| yaml::Segment::Key(part.to_owned())).collect();
    let line = yaml::Lines::of(text).map_or(0, |lines| lines.line(&path));
    if line == 0 { String::new() } else { format!("line {line}: ") }
}
