//! What is kept of each kind of objects: what is asked for often as it is, the rest compressed or not at all.
//! Whole objects of ten thousand deployments would fill the memory. Pure.

use crate::operator::decide::phase;
use crate::packed::{Packed, Packer};
use crate::rows;
use crate::snapshot::mark;
use jiff::Timestamp;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Namespace, Pod as PodObject, Secret as SecretObject};
use kube::ResourceExt as _;
use kube::api::{DynamicObject, ObjectMeta, PartialObjectMeta};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use styrmin_renderer::hooks::KEY_ANNOTATION;
use styrmin_renderer::names::ID_LENGTH;
use styrmin_renderer::network::{self, ALIAS_LABEL};
use styrmin_renderer::objects;
use styrmin_renderer::spec::{
    DEPLOYMENT_LABEL, DriverRef, ENVIRONMENT_LABEL, StyrminDeployment, StyrminDeploymentStatus,
};
use uuid::Uuid;

/// Annotation prefix of the fingerprints of a decrypted Secret.
const FINGERPRINT_PREFIX: &str = "fingerprint.styrmin.io/";

/// An id of ours in its place: texts of their own would be a third of what is kept.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Id([u8; ID_LENGTH]);

impl Id {
    /// An id; one of nothing when the text is none.
    #[must_use]
    pub fn of(text: &str) -> Self {
        text.as_bytes().try_into().map(Self).unwrap_or_default()
    }

    /// The text; empty when it was none.
    #[must_use]
    pub fn as_str(&self) -> &str {
        if *self == Self::default() { "" } else { std::str::from_utf8(&self.0).unwrap_or_default() }
    }
}

impl fmt::Debug for Id {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

fn label(labels: &BTreeMap<String, String>, name: &str) -> Id {
    Id::of(labels.get(name).map_or("", String::as_str))
}

/// Owns what the operator writes.
pub const FIELD_MANAGER: &str = "styrmin-operator";

/// The operator has written fields of an object.
#[must_use]
pub fn is_ours(metadata: &ObjectMeta) -> bool {
    let managers = metadata.managed_fields.iter().flatten();
    managers.into_iter().any(|entry| entry.manager.as_deref() == Some(FIELD_MANAGER))
}

/// A UID in its place. Kubernetes makes UUIDs; anything else is none.
fn uid(text: Option<&str>) -> Option<Uuid> {
    text.and_then(|text| Uuid::try_parse(text).ok())
}

/// How far the end of an application has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// It has not begun.
    Not,
    /// The teardown has begun; actions of the driver may still come, and need the release.
    Begun,
    /// What it was made of is being removed.
    Removes,
}

/// A StyrminDeployment.
#[derive(Debug, Clone)]
pub struct Deployment {
    /// Its UID.
    pub uid: Option<Uuid>,
    /// When it was created.
    pub created: Option<Timestamp>,
    /// It is on its way out.
    pub going: bool,
    /// Its phase; empty when it has none that is known.
    pub phase: &'static str,
    /// The end of its application.
    pub ending: Ending,
    /// It has the name that its deployment's object has.
    pub named: bool,
    /// Its driver.
    pub driver: Arc<DriverRef>,
    object: Packed,
}

impl PartialEq for Deployment {
    fn eq(&self, other: &Self) -> bool {
        self.object == other.object
    }
}

/// Keeps StyrminDeployments.
#[derive(Debug, Default)]
pub struct Deployments {
    packer: Packer,
    /// Many have the same driver.
    drivers: Mutex<Vec<Arc<DriverRef>>>,
}

/// Most drivers of which one copy is shared.
const DRIVERS_MAX: usize = 256;

impl Deployments {
    /// What is kept of one. `ending` says what a status tells of a teardown.
    #[must_use]
    pub fn keep(&self, object: &StyrminDeployment, ending: impl Fn(&StyrminDeploymentStatus) -> Ending) -> Deployment {
        let status = object.status.as_ref();
        Deployment {
            uid: uid(object.metadata.uid.as_deref()),
            created: object.creation_timestamp().map(|at| at.0),
            going: object.metadata.deletion_timestamp.is_some(),
            phase: status.and_then(|status| status.phase.as_deref()).map_or("", phase::known),
            ending: status.map_or(Ending::Not, ending),
            named: object.name_any() == object.spec.deployment_id.object_name(),
            driver: self.shared(&object.spec.driver),
            object: self.packer.pack(object),
        }
    }

    fn shared(&self, driver: &DriverRef) -> Arc<DriverRef> {
        let mut known = self.drivers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = known.iter().find(|known| ***known == *driver) {
            return Arc::clone(known);
        }
        if known.len() >= DRIVERS_MAX {
            known.clear();
        }
        let new = Arc::new(driver.clone());
        known.push(Arc::clone(&new));
        new
    }
}

impl Deployment {
    /// Differs whenever the object does.
    #[must_use]
    pub fn mark(&self) -> u64 {
        self.object.mark()
    }

    /// It is this object, and no other one of its name.
    #[must_use]
    pub fn has_uid(&self, text: Option<&str>) -> bool {
        self.uid.is_some() && self.uid == uid(text)
    }

    /// The object.
    #[must_use]
    pub fn object(&self) -> Option<StyrminDeployment> {
        self.object.unpack()
    }
}

/// An object of Flux.
#[derive(Debug, Clone, PartialEq)]
pub struct Flux {
    object: Packed,
}

impl Flux {
    /// What is kept of one.
    #[must_use]
    pub fn keep(packer: &Packer, object: &DynamicObject) -> Self {
        Self { object: packer.pack(object) }
    }

    /// Differs whenever the object does.
    #[must_use]
    pub fn mark(&self) -> u64 {
        self.object.mark()
    }

    /// The object.
    #[must_use]
    pub fn object(&self) -> Option<DynamicObject> {
        self.object.unpack()
    }

    /// The object as JSON.
    #[must_use]
    pub fn value(&self) -> Option<Value> {
        self.object.unpack()
    }
}

/// A network policy or Service that the operator wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// Id of the deployment that it belongs to; an alias belongs to the one that it leads to.
    pub owner: Id,
    /// Id of the environment that it lies in.
    pub environment: Id,
    /// It is a service alias.
    pub alias: bool,
    shape: u64,
    /// Its UID.
    pub uid: Option<Uuid>,
    /// It is on its way out.
    pub going: bool,
}

impl Written {
    /// What is kept of an object of a kind.
    #[must_use]
    pub fn keep(kind: &str, object: &Value) -> Self {
        let labels = &object["metadata"]["labels"];
        let label = |name: &str| Id::of(labels[name].as_str().unwrap_or_default());
        Self {
            owner: label(DEPLOYMENT_LABEL),
            environment: label(ENVIRONMENT_LABEL),
            alias: labels[ALIAS_LABEL.0] == ALIAS_LABEL.1,
            shape: mark(network::shape(kind, object)),
            uid: uid(object["metadata"]["uid"].as_str()),
            going: !object["metadata"]["deletionTimestamp"].is_null(),
        }
    }
}

impl Written {
    /// Whether what is ours of it is as wanted.
    #[must_use]
    pub fn is_as(&self, kind: &str, wanted: &Value) -> bool {
        self.shape == mark(network::shape(kind, wanted))
    }
}

/// A Secret that we or Flux made for a deployment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Secret {
    /// Id of the deployment.
    pub owner: Id,
    /// The operator has written it.
    pub ours: bool,
    /// Fingerprints of its keys, when Flux decrypted it.
    pub fingerprints: Box<[(Box<str>, Box<str>)]>,
    /// It is on its way out.
    pub going: bool,
    /// Others may have written it meanwhile.
    version: u64,
}

impl Secret {
    /// What is kept of one.
    #[must_use]
    pub fn keep(object: &PartialObjectMeta<SecretObject>) -> Self {
        let fingerprint = |(name, value): (&String, &String)| {
            Some((name.strip_prefix(FINGERPRINT_PREFIX)?.into(), value.as_str().into()))
        };
        Self {
            owner: label(object.labels(), DEPLOYMENT_LABEL),
            ours: is_ours(&object.metadata),
            fingerprints: object.annotations().iter().filter_map(fingerprint).collect(),
            going: object.metadata.deletion_timestamp.is_some(),
            version: mark(object.resource_version()),
        }
    }

    /// The fingerprint of a key.
    #[must_use]
    pub fn fingerprint(&self, key: &str) -> Option<&str> {
        self.fingerprints.iter().find(|(known, _)| **known == *key).map(|(_, fingerprint)| &**fingerprint)
    }
}

/// A Job of a driver's action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActionJob {
    /// Key of its step.
    pub step: Box<str>,
    /// Id of the environment of its deployment.
    pub environment: Id,
    /// It changes whenever its state does.
    version: u64,
}

impl ActionJob {
    /// What is kept of one.
    #[must_use]
    pub fn keep(object: &PartialObjectMeta<Job>) -> Self {
        Self {
            step: object.annotations().get(KEY_ANNOTATION).map_or("", String::as_str).into(),
            environment: label(object.labels(), ENVIRONMENT_LABEL),
            version: mark(object.resource_version()),
        }
    }
}

/// An application's namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Application {
    /// Id of the deployment.
    pub deployment: Id,
    /// Id of the environment, if the label is there.
    pub environment: Option<Id>,
    /// It is on its way out.
    pub going: bool,
    labels: u64,
}

impl Application {
    /// What is kept of one.
    #[must_use]
    pub fn keep(object: &PartialObjectMeta<Namespace>) -> Self {
        let labels = object.labels();
        let environment = labels.contains_key(ENVIRONMENT_LABEL);
        Self {
            deployment: label(labels, DEPLOYMENT_LABEL),
            environment: environment.then(|| label(labels, ENVIRONMENT_LABEL)),
            going: object.metadata.deletion_timestamp.is_some(),
            labels: mark(objects::NAMESPACE_LABELS.map(|name| labels.get(name).map(String::as_str))),
        }
    }

    /// Whether the labels that are ours are as wanted.
    #[must_use]
    pub fn has_labels_of(&self, wanted: &Value) -> bool {
        let labels = &wanted["metadata"]["labels"];
        self.labels == mark(objects::NAMESPACE_LABELS.map(|name| labels[name].as_str()))
    }
}

/// A pod: what a report says of it.
#[derive(Debug, Clone)]
pub struct Pod {
    /// It is ready, and not on its way out.
    pub ready: bool,
    row: Packed,
}

impl PartialEq for Pod {
    fn eq(&self, other: &Self) -> bool {
        self.row == other.row
    }
}

impl Pod {
    /// What is kept of one whose report is `row`.
    #[must_use]
    pub fn keep(packer: &Packer, object: &PodObject, row: &Value) -> Self {
        Self { ready: is_ready(object), row: packer.pack(row) }
    }

    /// Differs whenever what a report says of it does.
    #[must_use]
    pub fn mark(&self) -> u64 {
        self.row.mark()
    }

    /// What a report says of it.
    #[must_use]
    pub fn row(&self) -> Option<Value> {
        self.row.unpack()
    }
}

/// A pod is ready, and not on its way out.
#[must_use]
pub fn is_ready(pod: &PodObject) -> bool {
    pod.metadata.deletion_timestamp.is_none() && rows::says_ready(pod)
}
