//! The pure core of Styrmin.
//!
//! Given the same input it gives the same bytes, in the server (preview, validation, commit) and
//! in the operator (apply). What may enter: drivers, configuration levels, the context, instances
//! and their differences, plans, the `StyrminDeployment` type and the Kubernetes objects made from
//! it, YAML. What must never enter: I/O, a clock, randomness, async, a kube client, SQL, Git.
//!
//! The way through the modules: [`driver`] reads a driver; [`config`] merges the levels;
//! [`context`] resolves both into one tree; [`spec`] holds it as a `StyrminDeployment`;
//! [`diff`] and [`plan`] compare two of them; [`objects`] and [`values`] turn one into what
//! Kubernetes gets; [`layout`] says where each file lies in the cluster's repository, and
//! [`checkout`] whether such files are good.

pub mod canonical;
pub mod checkout;
pub mod config;
pub mod context;
pub mod diff;
pub mod driver;
pub mod hooks;
pub mod layout;
pub mod names;
pub mod network;
pub mod objects;
pub mod plan;
pub mod post_render;
pub mod problem;
pub mod spec;
pub mod values;
pub mod yaml;

pub use problem::{Problem, Problems};
