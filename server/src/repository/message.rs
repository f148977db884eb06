//! Commit messages: what changes in words, and trailers that name every instance.

use crate::store::{Instance, Person};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// One instance in a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Id of the instance.
    pub instance: String,
    /// Id of the deployment.
    pub deployment: String,
    /// Name of the deployment.
    pub name: String,
    /// Application and version, for people.
    pub application: String,
    /// Sequence of the instance.
    pub sequence: i64,
    /// Id of the task.
    pub task: String,
    /// create, update, upgrade or delete.
    pub workflow: String,
    /// Who changed.
    pub author: Person,
    /// What differs from the instance before, a line each.
    pub changes: Vec<String>,
}

impl Entry {
    /// An instance of the deployment of this name, without what differs.
    #[must_use]
    pub fn of(instance: &Instance, name: &str) -> Self {
        Self {
            instance: instance.id.clone(),
            deployment: instance.deployment_id.clone(),
            name: name.to_owned(),
            application: format!("{} {}", instance.spec.driver.name, instance.spec.application_version),
            sequence: instance.sequence,
            task: instance.task_id.clone(),
            workflow: instance.workflow.clone(),
            author: Person { name: instance.author_name.clone(), email: instance.author_email.clone() },
            changes: Vec::new(),
        }
    }
}

/// One file that is put back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restored {
    /// The deployment, or the file.
    pub name: String,
    /// The file.
    pub path: String,
    /// The commit that changed it.
    pub commit: String,
    /// That commit's author.
    pub author: Person,
}

impl Restored {
    fn text(&self) -> String {
        let commit = self.commit.get(..10).unwrap_or(&self.commit);
        let name = one_line(&self.name);
        format!("put back {name}, which {} changed in {commit}", self.author.name)
    }
}

/// What a commit does.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message {
    /// Clusters whose skeleton it brings, by name.
    pub clusters: Vec<String>,
    /// Environments that it sets up, by name.
    pub environments: Vec<String>,
    /// Releases of clusters' agents that it brings: cluster and version.
    pub agents: Vec<String>,
    /// Instances.
    pub entries: Vec<Entry>,
    /// Files of others' edits that it puts back.
    pub restored: Vec<Restored>,
}

/// Most changes that the body lists in words; the trailers name all.
const LISTED: usize = 100;
/// Most values that it lists of one change.
const VALUES: usize = 20;

impl Message {
    /// The text of the commit message.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = self.subject();
        text.push('\n');
        let set_up = self.clusters.len() + self.environments.len() + self.agents.len();
        let total = set_up + self.entries.len() + self.restored.len();
        let values = |entry: &Entry, indent: &str| {
            let mut lines: Vec<String> =
                entry.changes.iter().take(VALUES).map(|line| format!("{indent}- {line}\n")).collect();
            if entry.changes.len() > VALUES {
                lines.push(format!("{indent}- and {} more\n", entry.changes.len() - VALUES));
            }
            lines.concat()
        };
        if let ([entry], 1) = (&self.entries[..], total)
            && !entry.changes.is_empty()
        {
            text.push('\n');
            text.push_str(&values(entry, ""));
        }
        if total > 1 {
            text.push('\n');
            let lines = (self.clusters.iter().map(|name| format!("set up cluster {name}")))
                .chain(self.environments.iter().map(|name| format!("set up environment {name}")))
                .chain(self.agents.iter().map(|what| format!("release the agent of cluster {what}")))
                .chain(self.entries.iter().map(|entry| {
                    format!(
                        "{} deployment {} ({}), change {} by {}\n{}",
                        entry.workflow,
                        entry.name,
                        entry.application,
                        entry.sequence,
                        entry.author.name,
                        values(entry, "  ").trim_end()
                    )
                }))
                .chain(self.restored.iter().map(Restored::text));
            for line in lines.take(LISTED) {
                let _ = writeln!(text, "- {}", line.trim_end());
            }
            if total > LISTED {
                let _ = writeln!(text, "- and {} more", total - LISTED);
            }
        }
        if !self.entries.is_empty() || !self.restored.is_empty() {
            text.push('\n');
        }
        for restored in &self.restored {
            let _ = writeln!(text, "Styrmin-Restored: {}", one_line(&restored.path));
        }
        for entry in &self.entries {
            let _ = write!(
                text,
                "Styrmin-Instance: {}\nStyrmin-Deployment: {}\nStyrmin-Sequence: {}\nStyrmin-Task: {}\nChanged-By: {} <{}>\n",
                entry.instance, entry.deployment, entry.sequence, entry.task, entry.author.name, entry.author.email
            );
        }
        text
    }

    fn subject(&self) -> String {
        match (&self.entries[..], &self.environments[..], &self.clusters[..]) {
            ([], [], []) => match &self.restored[..] {
                [] => format!("Release the agent of cluster {}", self.agents.join(", ")),
                [only] => capitalised(&only.text()),
                all => format!("Put back {} files that others changed", all.len()),
            },
            ([entry], [], []) => {
                format!("{} deployment {} ({})", capitalised(&entry.workflow), entry.name, entry.application)
            }
            ([], [name], []) => format!("Set up environment {name}"),
            ([], _, [name]) => format!("Set up cluster {name}"),
            ([], names, clusters) => format!("Set up {} environments and {} clusters", names.len(), clusters.len()),
            (entries, ..) => {
                let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
                for entry in entries {
                    *counts.entry(&entry.workflow).or_default() += 1;
                }
                let parts: Vec<String> = counts.iter().map(|(workflow, count)| format!("{workflow} {count}")).collect();
                let noun = if entries.len() == 1 { "deployment" } else { "deployments" };
                capitalised(&format!("{} {noun}", parts.join(", ")))
            }
        }
    }

    /// The author when all of it is one person's.
    #[must_use]
    pub fn single_author<'a>(&'a self, others: impl IntoIterator<Item = &'a Person>) -> Option<&'a Person> {
        let mut people = self.entries.iter().map(|entry| &entry.author).chain(others);
        let first = people.next()?;
        people.all(|person| person == first).then_some(first)
    }
}

/// A path may hold a line break, and what follows it must not be a trailer.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// A text that begins with a capital.
pub(crate) fn capitalised(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, workflow: &str, person: &str) -> Entry {
        Entry {
            instance: format!("i-{name}"),
            deployment: format!("d-{name}"),
            name: name.into(),
            application: "web 1.0".into(),
            sequence: 7,
            task: format!("t-{name}"),
            workflow: workflow.into(),
            author: Person { name: person.into(), email: format!("{person}@example.com") },
            changes: Vec::new(),
        }
    }

    #[test]
    fn one_change_is_the_subject() {
        let changes = vec!["config.env_vars.COLOR: \"red\" → \"blue\"".to_owned()];
        let message =
            Message { entries: vec![Entry { changes, ..entry("shop", "update", "Ann") }], ..Message::default() };
        assert_eq!(
            message.text(),
            "Update deployment shop (web 1.0)\n\n- config.env_vars.COLOR: \"red\" → \"blue\"\n\nStyrmin-Instance: i-shop\nStyrmin-Deployment: d-shop\nStyrmin-Sequence: 7\nStyrmin-Task: t-shop\nChanged-By: Ann <Ann@example.com>\n"
        );
        assert_eq!(message.single_author([]).map(|person| person.name.as_str()), Some("Ann"));
    }

    #[test]
    fn several_changes_are_counted_and_listed() {
        let message = Message {
            environments: vec!["prod".into()],
            entries: vec![
                entry("a", "create", "Ann"),
                Entry {
                    changes: vec!["lifecycle: \"running\" → \"stopped\"".into(); 25],
                    ..entry("b", "create", "Bob")
                },
                entry("c", "delete", "Ann"),
            ],
            ..Message::default()
        };
        let text = message.text();
        assert!(
            text.starts_with("Create 2, delete 1 deployments\n\n- set up environment prod\n- create deployment a "),
            "{text}"
        );
        assert!(text.contains("change 7 by Bob\n  - lifecycle: \"running\" → \"stopped\"\n"), "{text}");
        assert!(text.contains("  - and 5 more\n- delete deployment c "), "{text}");
        assert_eq!(text.matches("Styrmin-Instance: ").count(), 3);
        assert_eq!(message.single_author([]), None);
    }
}
