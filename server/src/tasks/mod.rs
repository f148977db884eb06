//! Tasks: one change on its way, with steps. The state machine is pure; what happened is told to
//! it by the repository writer (a push) and by reports.

pub mod machine;
