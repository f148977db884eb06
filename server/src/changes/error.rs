//! Why a change was not made. Whatever it is, nothing of the change is stored.

use crate::store::{Deployment, Instance, StoreError};
use styrmin_renderer::Problems;
use styrmin_renderer::diff::{self, Change};

/// Why a change was not made.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// The input is not good: object, field, remedy.
    #[error(transparent)]
    Invalid(#[from] Problems),
    /// What the input names does not exist.
    #[error("{kind} \"{id}\": does not exist; look at the list of what there is")]
    NotFound {
        /// What kind of object.
        kind: &'static str,
        /// As the caller named it.
        id: String,
    },
    /// The caller looked at an instance that is no longer the newest.
    #[error(transparent)]
    BaseMoved(Box<BaseMoved>),
    /// Too many changes of the same rows at once.
    #[error("too many changes of the same object at this moment; try again")]
    Busy,
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Something that must not happen.
    #[error(transparent)]
    Internal(#[from] anyhow::Error),
}

/// Both sides of a conflict: what the caller looked at, and what there is now.
#[derive(Debug, Clone, PartialEq)]
pub struct BaseMoved {
    /// Name of the deployment.
    pub deployment: String,
    /// The instance that the caller looked at.
    pub base: (String, i64),
    /// The newest instance and who made it.
    pub newest: Option<(String, i64, String)>,
    /// What differs between the two.
    pub changes: Vec<Change>,
}

impl BaseMoved {
    pub(super) fn new(deployment: &Deployment, base: &Instance, newest: Option<&Instance>) -> Self {
        Self {
            deployment: deployment.name.clone(),
            base: (base.id.clone(), base.sequence),
            newest: newest.map(|newest| (newest.id.clone(), newest.sequence, newest.author_name.clone())),
            changes: newest.map(|newest| diff::specs(Some(&base.spec), &newest.spec)).unwrap_or_default(),
        }
    }
}

impl std::fmt::Display for BaseMoved {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "deployment \"{}\": base_instance_id: you looked at change {}", self.deployment, self.base.1)?;
        if let Some((_, sequence, author)) = &self.newest {
            write!(f, ", the newest is change {sequence} by {author}")?;
        }
        let fields: Vec<&str> = self.changes.iter().take(5).map(|change| change.field.as_str()).collect();
        if !fields.is_empty() {
            write!(f, ", which differs in {}", fields.join(", "))?;
            if self.changes.len() > fields.len() {
                write!(f, " and {} more", self.changes.len() - fields.len())?;
            }
        }
        f.write_str("; look at it and decide again")
    }
}

impl std::error::Error for BaseMoved {}
