//! The Styrmin agent: operator and reporter of one cluster. An empty shell for now; it says so
//! instead of pretending to work.

use clap::Parser;

/// The Styrmin agent.
#[derive(Debug, Parser)]
#[command(name = "styrmin-agent", version)]
struct Settings {}

fn main() -> std::process::ExitCode {
    let Settings {} = Settings::parse();
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "the agent has no operator and no reporter yet");
    std::process::ExitCode::FAILURE
}
