//! What the documentation says is so: references are those of the code, links lead somewhere, examples are good, and
//! messages are the ones that people meet.

use clap::Command;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use styrmin_tests::server::text_files;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// Compares a file with what it should be, or writes it with STYRMIN_UPDATE=1.
fn is_written(path: &str, wanted: &str) {
    let path = root().join("docs/reference").join(path);
    if std::env::var_os("STYRMIN_UPDATE").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, wanted).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(found == wanted, "{} is old: STYRMIN_UPDATE=1 cargo test -p styrmin-tests docs::", path.display());
}

/// A text of the command line, for a cell of a table.
fn cell(text: &str) -> String {
    text.replace('\n', " ").replace('|', "\\|")
}

/// The arguments of a command, as rows.
fn arguments(command: &Command, text: &mut String) {
    let all: Vec<_> = command.get_arguments().filter(|one| !one.is_global_set() && !one.is_hide_set()).collect();
    let all: Vec<_> = all.into_iter().filter(|one| !["help", "version"].contains(&one.get_id().as_str())).collect();
    if all.is_empty() {
        return;
    }
    text.push_str("\n| argument | variable | default | what it is |\n|---|---|---|---|\n");
    for one in all {
        let value = one.get_value_names().map(|names| names.join(" ")).filter(|_| one.get_action().takes_values());
        let name = match (one.get_long(), &value) {
            (Some(long), Some(value)) => format!("`--{long} {value}`"),
            (Some(long), None) => format!("`--{long}`"),
            (None, Some(value)) => format!("`{value}`"),
            (None, None) => continue,
        };
        let variable = one.get_env().map(|name| format!("`{}`", name.display())).unwrap_or_default();
        let defaults: Vec<String> =
            one.get_default_values().iter().map(|value| format!("`{}`", value.display())).collect();
        let shown = if one.get_action().takes_values() { defaults.join(" ") } else { String::new() };
        let help = one
            .get_help()
            .map(|help| format!("{}.", cell(&help.to_string()).trim_end_matches('.')))
            .unwrap_or_default();
        let choices: Vec<String> = one.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
        let choices = if choices.is_empty() || !one.get_action().takes_values() || choices == ["true", "false"] {
            String::new()
        } else {
            format!(" One of {}.", choices.join(", "))
        };
        let _ = writeln!(text, "| {} | {variable} | {} | {help}{choices} |", cell(&name), cell(&shown));
    }
}

/// Every command below one, each with a heading.
fn commands(command: &Command, path: &str, text: &mut String) {
    for one in command.get_subcommands().filter(|one| one.get_name() != "help") {
        let path = format!("{path} {}", one.get_name());
        let about = one.get_about().map(ToString::to_string).unwrap_or_default();
        let _ = write!(text, "\n## {path}\n\n{}.\n", cell(&about).trim_end_matches('.'));
        arguments(one, text);
        commands(one, &path, text);
    }
}

#[test]
fn the_reference_of_settings_is_that_of_the_code() {
    let mut text = String::from(
        "# Settings\n\nEvery setting is an argument, or an environment variable. This page is made from the code.\n",
    );
    for command in [styrmin_server::settings::command(), styrmin_agent::settings::command()] {
        let _ = write!(
            text,
            "\n# {}\n\n{}.\n",
            command.get_name(),
            command.get_about().unwrap().to_string().replace('\n', " ").trim_end_matches('.')
        );
        arguments(&command, &mut text);
        commands(&command, command.get_name(), &mut text);
    }
    text.push_str("\n`STYRMIN_LOG` chooses what each of them logs: error, warn, info (the default), debug or trace, also for each module.\n");
    is_written("settings.md", &text);
}

#[test]
fn the_reference_of_the_command_line_is_that_of_the_code() {
    let command = styrminctl::command();
    let mut text =
        String::from("# styrminctl\n\nThis page is made from the code. These arguments go with every command:\n");
    let globals = command.clone().mut_args(|argument| argument.global(false));
    let mut only = Command::new("styrminctl");
    for argument in globals.get_arguments() {
        only = only.arg(argument.clone());
    }
    arguments(&only, &mut text);
    commands(&command, "styrminctl", &mut text);
    is_written("styrminctl.md", &text);
}

#[test]
fn the_reference_of_the_api_is_that_of_the_schema() {
    let schema = std::fs::read_to_string(root().join("server/schema.graphql")).unwrap();
    is_written(
        "graphql.md",
        &format!(
            "# GraphQL\n\nAt `/graphql`, with a token in every call (`Authorization: Bearer TOKEN`). This page is made from the code.\n\n```graphql\n{}\n```\n",
            schema.trim_end()
        ),
    );
}

/// The pages, by their paths.
fn pages() -> Vec<(PathBuf, String)> {
    let docs = root().join("docs");
    let mut pages: Vec<_> = text_files(&docs).into_iter().map(|(path, text)| (docs.join(path), text)).collect();
    pages.retain(|(path, _)| path.extension().is_some_and(|extension| extension == "md"));
    pages.push((root().join("README.md"), std::fs::read_to_string(root().join("README.md")).unwrap()));
    pages
}

/// A page without its code.
fn prose(text: &str) -> String {
    let outside = text.split("```").step_by(2);
    outside.flat_map(|part| part.split('`').step_by(2)).collect()
}

/// The anchor of a heading, as forges make it.
fn anchor(heading: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || *c == ' ' || *c == '-' || *c == '_';
    heading.trim().to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-")
}

#[test]
fn every_link_leads_somewhere() {
    let mut broken = Vec::new();
    for (path, text) in pages() {
        for link in prose(&text).split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(link, _)| link) {
            if link.starts_with("http://") || link.starts_with("https://") {
                continue;
            }
            let (file, section) = link.split_once('#').map_or((link, None), |(file, section)| (file, Some(section)));
            let target = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            let found = target.exists()
                && section.is_none_or(|section| {
                    let text = std::fs::read_to_string(&target).unwrap_or_default();
                    text.lines()
                        .filter_map(|line| line.strip_prefix('#'))
                        .any(|line| anchor(line.trim_start_matches('#')) == section)
                });
            if !found {
                broken.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn the_drivers_of_the_guide_are_good() {
    let examples = root().join("docs/examples");
    let guide = std::fs::read_to_string(root().join("docs/write-a-driver.md")).unwrap();
    for entry in std::fs::read_dir(examples).unwrap() {
        let folder = entry.unwrap().path();
        let files = text_files(&folder);
        let driver = styrmin_renderer::driver::Driver::from_files(files.clone());
        assert!(driver.is_ok(), "{}: {:?}", folder.display(), driver.unwrap_err());
        // Every line of them is in the guide.
        for (name, text) in files {
            let missing: Vec<&str> =
                text.lines().filter(|line| !line.trim().is_empty() && !guide.contains(line.trim())).collect();
            assert!(missing.is_empty(), "{name} has what the guide does not show: {missing:#?}");
        }
    }
}

/// The longest part of a message that does not vary.
fn fixed(message: &str) -> &str {
    message.split('…').flat_map(|part| part.split('"')).max_by_key(|part| part.len()).unwrap_or_default()
}

#[test]
fn the_messages_of_the_guide_are_those_of_the_code() {
    let mut code = String::new();
    for room in ["renderer/src", "server/src", "agent/src", "styrminctl/src", "styrminctl/client/src", "helm"] {
        for (_, text) in text_files(&root().join(room)) {
            code.push_str(&text);
            code.push('\n');
        }
    }
    // Messages go over several lines, with a break that is not part of them.
    let mut flat = String::new();
    let mut rest = code.as_str();
    while let Some((before, after)) = rest.split_once("\\\n") {
        flat.push_str(before);
        rest = after.trim_start();
    }
    flat.push_str(rest);
    let text = std::fs::read_to_string(root().join("docs/troubleshooting.md")).unwrap();
    let mut unknown = BTreeSet::new();
    let tables = text.split("| What you see ").skip(1).flat_map(|table| table.split("\n\n").next());
    for line in tables.flat_map(str::lines).filter(|line| line.starts_with("| `")) {
        let first = line.trim_start_matches("| ").split(" | ").next().unwrap();
        let messages: Vec<&str> = first.split('`').skip(1).step_by(2).collect();
        let longest = messages.iter().map(|message| fixed(message)).max_by_key(|part| part.len()).unwrap();
        if longest.trim().len() < 8 || !flat.contains(longest.trim()) {
            unknown.insert(format!("{longest} ({first})"));
        }
    }
    assert!(unknown.is_empty(), "messages that nothing says: {unknown:#?}");
}
