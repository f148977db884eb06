//! The end-to-end tests, one module for each file: of one kind of behaviour, against real parts. One crate,
//! since each would link the whole workspace: some thirty times the time and five gigabytes more.
//! `scripts/test` runs each file in a process of its own. What several of them need is in `src`.

mod bad_input;
mod canary;
mod cluster_loop;
mod concurrency;
mod conformance;
mod control_plane;
mod docs;
mod doctor;
mod drivers;
mod edits;
mod edits_in_cluster;
mod fan_outs;
mod faults;
mod install;
mod kills;
mod large;
mod many;
mod operator;
mod operator_faults;
mod proposal_faults;
mod proposals;
mod proposals_in_cluster;
mod reach;
mod rendered;
mod replicas;
mod report_rules;
mod reports;
mod repository;
mod secrets;
mod server;
mod signing;
mod store;
mod upgrades;
mod validate;
mod workflows;
mod yaml;
