//! Errors as GraphQL answers: a message for people, a code for programs.

use crate::changes::ChangeError;
use crate::reports::ReportError;
use crate::store::StoreError;
use async_graphql::{Error, ErrorExtensions as _, Value};
use serde_json::json;
use tracing::error;

/// A code for programs.
pub(super) fn coded(message: impl Into<String>, code: &str) -> Error {
    Error::new(message).extend_with(|_, extensions| extensions.set("code", code))
}

fn as_value(value: serde_json::Value) -> Value {
    Value::from_json(value).unwrap_or(Value::Null)
}

/// What went wrong inside is logged here, once, and not shown.
fn internal(cause: &dyn std::fmt::Display) -> Error {
    let reference = uuid::Uuid::now_v7().to_string();
    error!(reference, error = %cause, "a request failed");
    coded(format!("internal error; the server's log has it under {reference}"), "INTERNAL")
}

pub(super) fn change(error: ChangeError) -> Error {
    let message = error.to_string();
    match error {
        ChangeError::Invalid(problems) => coded(message, "INVALID").extend_with(|_, extensions| {
            let list: Vec<_> = problems
                .0
                .iter()
                .map(|problem| json!({ "object": problem.object, "field": problem.field, "message": problem.message }))
                .collect();
            extensions.set("problems", as_value(json!(list)));
        }),
        ChangeError::NotFound { .. } => coded(message, "NOT_FOUND"),
        ChangeError::BaseMoved(moved) => coded(message, "CONFLICT").extend_with(|_, extensions| {
            extensions.set("base", as_value(json!({ "instanceId": moved.base.0, "sequence": moved.base.1 })));
            let newest = moved
                .newest
                .as_ref()
                .map(|(id, sequence, author)| json!({ "instanceId": id, "sequence": sequence, "author": author }));
            extensions.set("newest", as_value(json!(newest)));
            let changes: Vec<_> = moved
                .changes
                .iter()
                .map(|change| json!({ "field": change.field, "old": change.old, "new": change.new }))
                .collect();
            extensions.set("changes", as_value(json!(changes)));
        }),
        ChangeError::Busy => coded(message, "BUSY"),
        ChangeError::Store(cause) => internal(&cause),
        ChangeError::Internal(cause) => internal(&format!("{cause:#}")),
    }
}

pub(super) fn report(error: ReportError) -> Error {
    let message = error.to_string();
    match error {
        ReportError::Stale { last, .. } => coded(message, "STALE_REPORT").extend_with(|_, extensions| {
            extensions.set("identity", last.identity.clone());
            extensions.set("epoch", last.epoch);
            extensions.set("sequence", last.sequence);
        }),
        ReportError::ForeignCluster { .. } => coded(message, "FOREIGN_CLUSTER"),
        ReportError::WholeNeeded => coded(message, "WHOLE_NEEDED"),
        ReportError::Invalid { .. } => coded(message, "INVALID"),
        ReportError::Busy => coded(message, "BUSY"),
        ReportError::Store(cause) => internal(&cause),
        ReportError::Internal(cause) => internal(&format!("{cause:#}")),
    }
}

/// The limits of a query in words; the library's own messages name no remedy.
pub(super) fn explain_limits(response: &mut async_graphql::Response) {
    for error in &mut response.errors {
        let limit = match error.message.trim_end_matches('.').to_lowercase().as_str() {
            "recursion limit exceeded"
            | "the recursion depth of the query cannot be greater than `24`"
            | "query is nested too deep" => {
                "the query is nested too deeply; ask for deeper objects by their id in a query of their own"
            }
            "query is too complex" => "the query is too complex; ask for fewer objects or fields at once",
            _ => continue,
        };
        error.message = limit.to_owned();
    }
}

pub(super) fn store(error: StoreError) -> Error {
    internal(&error)
}

/// With all its causes.
pub(super) fn inner(error: anyhow::Error) -> Error {
    internal(&format!("{error:#}"))
}
