//! What reviewers read: what a proposal changes, in words, with its risks and the Kubernetes objects.
//!
//! [`text`] gathers, [`render`] writes (pure). A text that a forge would not take is shortened from its end: first the
//! objects, then values, never the list of deployments' risks; and says where the whole is.

use crate::changes::{ChangeError, Changes, Preview, Scene};
use crate::repository::capitalised;
use crate::tasks::machine;
use serde_json::Value;
use std::fmt::Write as _;
use styrmin_renderer::canonical;
use styrmin_renderer::config::Level;
use styrmin_renderer::context::SecretRef;

/// Deployments that are described each; more are counted.
const PARTS_MAX: usize = 100;
/// Values of one deployment.
const VALUES_MAX: usize = 40;
/// Longest value.
const VALUE_MAX: usize = 120;
/// Lines about values that somebody set elsewhere.
const OVERRIDES_MAX: usize = 50;
/// Room that is kept for the words that something was left out.
const REST: usize = 400;

/// Title and description of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text {
    /// In one line.
    pub title: String,
    /// Markdown.
    pub body: String,
}

impl Text {
    /// Tells whether a forge has this one.
    #[must_use]
    pub fn digest(&self) -> String {
        canonical::digest_bytes(format!("{}\n{}", self.title, self.body).as_bytes())
    }
}

/// What a description is written from.
#[derive(Debug, Clone, Default)]
struct Facts {
    title: String,
    /// Who asks.
    author: String,
    cluster: String,
    /// How the configuration of a cluster or environment changes, a line each.
    configuration: Vec<String>,
    parts: Vec<Described>,
    /// Deployments beyond those.
    more: usize,
    /// Values that deployments keep.
    overrides: Vec<String>,
    more_overrides: usize,
    /// Where the whole text is.
    whole: String,
}

#[derive(Debug, Clone, Default)]
struct Described {
    environment: String,
    name: String,
    url: String,
    workflow: String,
    /// Driver and application, before and after.
    versions: Vec<String>,
    /// Field, old, new, where it is set.
    values: Vec<[String; 4]>,
    marks: Vec<String>,
    /// Steps beside those of every change.
    hooks: Vec<String>,
    /// Name and unified diff of each object.
    objects: Vec<(String, String)>,
    /// Why it cannot be said.
    problem: Option<String>,
}

/// Gathers and writes the description of a proposal, of `most` characters at most.
///
/// # Errors
/// When the database fails.
pub async fn text(changes: &Changes, scene: &Scene, public: &str, most: usize) -> Result<Text, ChangeError> {
    let proposal = &scene.proposal;
    // The whole is for who asks for it, and leaves nothing out.
    let whole = most == usize::MAX;
    let (parts_max, overrides_max) = if whole { (usize::MAX, usize::MAX) } else { (PARTS_MAX, OVERRIDES_MAX) };
    let mut facts = Facts {
        title: proposal.title.clone(),
        author: proposal.author_name.clone(),
        cluster: scene.cluster.name.clone(),
        more: scene.parts.len().saturating_sub(parts_max),
        whole: format!("{public}/proposals/{}", proposal.id),
        ..Facts::default()
    };
    for patch in &proposal.patches {
        for pointer in styrmin_renderer::config::leaves(&patch.set) {
            let value = styrmin_renderer::config::at(&patch.set, &pointer).map(shown).unwrap_or_default();
            facts.configuration.push(format!("{}: {value}", dotted(&pointer)));
        }
        facts.configuration.extend(patch.remove.iter().map(|pointer| format!("{}: not set any more", dotted(pointer))));
    }
    for part in scene.parts.iter().take(parts_max) {
        let mut described = match changes.preview_part(proposal, part).await {
            Ok(preview) => of_preview(&preview),
            Err(ChangeError::Store(error)) => return Err(error.into()),
            Err(error) => Described { problem: Some(error.to_string()), ..Described::default() },
        };
        described.environment.clone_from(&part.environment.name);
        described.name.clone_from(&part.deployment.name);
        described.url = format!("{public}/#/deployments/{}", part.deployment.id);
        described.workflow.clone_from(&part.instance.workflow);
        facts.parts.push(described);
    }
    if let (None, [part], [described]) = (&proposal.level, &scene.parts[..], &facts.parts[..]) {
        let spec = &part.instance.spec;
        facts.title = format!(
            "{} deployment {} ({} {})",
            capitalised(&described.workflow),
            part.deployment.name,
            spec.driver.name,
            spec.application_version
        );
    } else if proposal.level.is_some() {
        let count = scene.parts.len();
        let noun = if count == 1 { "deployment" } else { "deployments" };
        facts.title = format!("{} ({count} {noun})", proposal.title);
        (facts.overrides, facts.more_overrides) = changes.overridden(proposal, overrides_max).await?;
    }
    Ok(render(&facts, most))
}

/// Steps that every change has.
const USUAL: [&str; 10] = [
    machine::WRITE_STEP,
    machine::REMOVE_STEP,
    machine::REQUEST_STEP,
    machine::REVIEW_STEP,
    machine::FLUX_STEP,
    machine::PREREQUISITES_STEP,
    machine::HELM_STEP,
    machine::SERVICES_STEP,
    machine::READY_STEP,
    machine::TEARDOWN_STEP,
];

fn of_preview(preview: &Preview) -> Described {
    let mut described = Described {
        hooks: preview.steps.iter().filter(|step| !USUAL.contains(&step.as_str())).cloned().collect(),
        objects: preview
            .objects
            .iter()
            .map(|object| {
                let place: Vec<&str> = [object.kind.as_str(), object.namespace.as_str(), object.name.as_str()]
                    .into_iter()
                    .filter(|part| !part.is_empty())
                    .collect();
                let word = match (object.added, object.removed) {
                    (true, _) => "new",
                    (_, true) => "removed",
                    _ => "changed",
                };
                (format!("{} ({word})", place.join("/")), object.diff.clone())
            })
            .collect(),
        ..Described::default()
    };
    let is_delete = preview.workflow.as_deref() == Some("delete");
    let is_new = preview.workflow.as_deref() == Some("create");
    if is_delete {
        described.marks.push("deletes data: the application and its namespace go, with everything in it".to_owned());
    }
    let mut restarts = false;
    for (change, origin) in &preview.values {
        let (old, new) = (change.old.as_ref(), change.new.as_ref());
        let text = |value: Option<&Value>| value.map_or_else(String::new, shown);
        match change.pointer.as_str() {
            "/driver/version" => described.versions.push(format!("driver {} → {}", text(old), text(new))),
            "/applicationVersion" => described.versions.push(format!("application {} → {}", text(old), text(new))),
            "/lifecycle" if new == Some(&Value::from("stopped")) => {
                described.marks.push("stops all pods".to_owned());
            }
            _ => {}
        }
        let pointer = change.pointer.to_lowercase();
        if !is_new && ["ingress", "fqdn", "hostname", "/url"].iter().any(|word| pointer.contains(word)) {
            described.marks.push("moves an address or an ingress".to_owned());
        }
        restarts |= !is_new && !pointer.ends_with("/replicas") && pointer != "/lifecycle" && pointer != "/jobs";
        let Some(field) = field(&change.field, &change.pointer) else { continue };
        let is_secret = change.pointer.contains("/secretRef/")
            || [old, new].into_iter().flatten().any(|value| SecretRef::read(value).is_some());
        let row = if is_secret {
            let name = field.split(".secretRef").next().unwrap_or(&field).to_owned();
            [name, String::new(), "another secret".to_owned(), String::new()]
        } else {
            let place = origin.map(level).unwrap_or_default().to_owned();
            [field, text(old), text(new), place]
        };
        if !described.values.contains(&row) {
            described.values.push(row);
        }
    }
    if restarts && preview.objects.iter().any(|object| object.kind == "Secret" || object.kind == "HelmRelease") {
        described.marks.push("restarts pods".to_owned());
    }
    described.marks.extend(described.hooks.iter().map(|step| match step.strip_prefix("Run ") {
        Some(action) => format!("runs {action}"),
        None => format!("step \"{step}\""),
    }));
    described.marks.extend(preview.warnings.iter().filter(|_| !is_delete).cloned());
    described.marks.dedup();
    let mut seen = std::collections::HashSet::new();
    described.marks.retain(|mark| seen.insert(mark.clone()));
    described
}

/// The name of a field for people; `None`: it follows from another one.
fn field(field: &str, pointer: &str) -> Option<String> {
    if ["/driver/digest", "/context/app/version"].contains(&pointer) {
        return None;
    }
    let Some(rest) = field.strip_prefix("context.") else { return Some(field.to_owned()) };
    let rest = if rest.starts_with("parameters.") { rest } else { rest.strip_prefix("instance.")? };
    (rest.starts_with("parameters.") || rest.starts_with("config")).then(|| rest.to_owned())
}

fn level(level: Level) -> &'static str {
    match level {
        Level::Styrmin => "Styrmin's default",
        Level::Driver => "driver's default",
        Level::Cluster => "cluster",
        Level::Environment => "environment",
        Level::Deployment => "deployment",
    }
}

fn dotted(pointer: &str) -> String {
    pointer.trim_start_matches('/').replace('/', ".")
}

fn shown(value: &Value) -> String {
    let text = match value {
        Value::String(text) if !text.is_empty() => text.clone(),
        other => other.to_string(),
    };
    super::limited(&text, VALUE_MAX)
}

fn render(facts: &Facts, most: usize) -> Text {
    let mut body = String::new();
    let author = plain(&facts.author);
    if !facts.configuration.is_empty() {
        let _ = writeln!(body, "{author} asks for another configuration in cluster **{}**:\n", facts.cluster);
        for line in &facts.configuration {
            let _ = writeln!(body, "- {}", code(line));
        }
        let _ = writeln!(body, "\nIt changes these deployments:\n");
    }
    for part in &facts.parts {
        let _ = write!(body, "{}", heading(part, facts));
    }
    if facts.more > 0 {
        let _ = writeln!(body, "- and {} more", facts.more);
    }
    if !facts.overrides.is_empty() {
        body.push_str("\n### What overrides it\n\n");
        for line in &facts.overrides {
            let _ = writeln!(body, "- {}", code(line));
        }
        if facts.more_overrides > 0 {
            let _ = writeln!(body, "- and {} more", facts.more_overrides);
        }
    }
    // What follows is left out from its end when it is too much.
    let values_max = if most == usize::MAX { usize::MAX } else { VALUES_MAX };
    let mut sections: Vec<String> = facts.parts.iter().filter_map(|part| values(part, facts, values_max)).collect();
    sections.extend(facts.parts.iter().flat_map(|part| part.objects.iter().map(|object| objects(part, object))));
    let mut left_out = 0;
    let mut count = body.chars().count();
    for section in sections {
        let length = section.chars().count();
        if left_out > 0 || (count + length).saturating_add(REST) > most {
            left_out += 1;
            continue;
        }
        count += length;
        body.push_str(&section);
    }
    if count.saturating_add(REST) > most {
        body = body.chars().take(most.saturating_sub(REST)).collect();
        left_out += 1;
    }
    if left_out > 0 {
        let _ = write!(body, "\n\n_Shortened: {left_out} parts are left out. The whole is at {}_\n", facts.whole);
    }
    Text { title: facts.title.clone(), body }
}

fn heading(part: &Described, facts: &Facts) -> String {
    let link = format!("[{}]({})", part.name, part.url);
    let mut text = if facts.configuration.is_empty() {
        format!(
            "{} asks to **{}** deployment **{link}** in environment **{}** of cluster **{}**.\n",
            plain(&facts.author),
            part.workflow,
            part.environment,
            facts.cluster
        )
    } else {
        format!("- **{}/{link}**: {}", part.environment, part.workflow)
    };
    let versions = part.versions.join(", ");
    if facts.configuration.is_empty() {
        if !versions.is_empty() {
            let _ = writeln!(text, "\n{versions}");
        }
        if !part.marks.is_empty() {
            text.push('\n');
        }
        for mark in &part.marks {
            let _ = writeln!(text, "- ⚠️ {}", plain(mark));
        }
        if let Some(problem) = &part.problem {
            let _ = writeln!(text, "\nIt cannot be said what changes: {}", plain(problem));
        }
        return text;
    }
    let mut words: Vec<String> = (!versions.is_empty()).then_some(versions).into_iter().collect();
    words.extend(part.marks.iter().map(|mark| format!("⚠️ {}", plain(mark))));
    words.extend(part.problem.iter().map(|problem| plain(problem)));
    if !words.is_empty() {
        let _ = write!(text, "; {}", words.join("; "));
    }
    text.push('\n');
    text
}

fn values(part: &Described, facts: &Facts, values_max: usize) -> Option<String> {
    if part.values.is_empty() {
        return None;
    }
    let mut text = match facts.configuration.is_empty() {
        true => "\n### Values\n\n".to_owned(),
        false => format!("\n### Values of {}/{}\n\n", part.environment, part.name),
    };
    text.push_str("| value | old | new | set on |\n|---|---|---|---|\n");
    for [field, old, new, place] in part.values.iter().take(values_max) {
        let _ = writeln!(text, "| {} | {} | {} | {place} |", cell(field), cell(old), cell(new));
    }
    if part.values.len() > values_max {
        let _ = writeln!(text, "\nand {} more", part.values.len() - values_max);
    }
    Some(text)
}

fn objects(part: &Described, (name, diff): &(String, String)) -> String {
    // Longer than any fence inside.
    let inside = diff.split(|c| c != '`').map(str::len).max().unwrap_or_default();
    let fence = "`".repeat(inside.max(2) + 1);
    format!(
        "\n<details><summary>{}/{}: {}</summary>\n\n{fence}diff\n{}\n{fence}\n\n</details>\n",
        part.environment,
        part.name,
        name.replace('<', "&lt;"),
        diff.trim_end()
    )
}

/// A text in which nothing is markup, and nobody is called.
fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\\' | '`' | '*' | '_' | '[' | ']' | '<' | '>' | '|' | '#' => plain.extend(['\\', c]),
            '@' => plain.push_str("@\u{200b}"),
            c if c.is_control() => plain.push(' '),
            c => plain.push(c),
        }
    }
    plain
}

/// A text as code.
fn code(text: &str) -> String {
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.is_empty() {
        return String::new();
    }
    if text.contains('`') { format!("`` {text} ``") } else { format!("`{text}`") }
}

/// The same in a table.
fn cell(text: &str) -> String {
    code(text).replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(parts: usize) -> Facts {
        let part = |index: usize| Described {
            environment: "prod".into(),
            name: format!("front-{index}"),
            url: "https://styrmin.example/#/deployments/d".into(),
            workflow: "upgrade".into(),
            versions: vec!["driver 1.4.0 → 1.5.0".into()],
            values: vec![["config.env_vars.A".into(), "a|b".into(), "c`d".into(), "environment".into()]],
            marks: vec!["runs \"migrate\"".into()],
            objects: vec![("HelmRelease/ns/x (changed)".into(), "-a\n+```\n".into())],
            ..Described::default()
        };
        Facts {
            title: "t".into(),
            author: "Ann [@all](x)".into(),
            cluster: "c".into(),
            configuration: vec!["env_vars.A: 1".into()],
            parts: (0..parts).map(part).collect(),
            overrides: vec!["prod/back keeps env_vars.A: 2 (set on the deployment)".into()],
            whole: "https://styrmin.example/proposals/p".into(),
            ..Facts::default()
        }
    }

    #[test]
    fn reviewers_read_what_changes_and_what_it_risks() {
        let text = render(&facts(1), 10_000).body;
        assert!(
            text.starts_with(
                "Ann \\[@\u{200b}all\\](x) asks for another configuration in cluster **c**:\n\n- `env_vars.A: 1`\n"
            ),
            "{text}"
        );
        assert!(text.contains("- **prod/[front-0](https://styrmin.example/#/deployments/d)**: upgrade; driver 1.4.0 → 1.5.0; ⚠️ runs \"migrate\"\n"), "{text}");
        assert!(text.contains("| `config.env_vars.A` | `a\\|b` | `` c`d `` | environment |"), "{text}");
        assert!(text.contains("````diff\n-a\n+```\n````"), "{text}");
        assert!(text.contains("### What overrides it\n\n- `prod/back keeps"), "{text}");
        assert!(!text.contains("Shortened"), "{text}");
    }

    #[test]
    fn what_reviewers_read_is_as_written_down() {
        let single = Facts { configuration: Vec::new(), overrides: Vec::new(), ..facts(1) };
        let text = format!("{}\n---\n{}", render(&facts(2), 10_000).body, render(&single, 10_000).body);
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/proposals/describe.golden.md");
        if std::env::var_os("STYRMIN_UPDATE").is_some() {
            std::fs::write(path, &text).unwrap();
        }
        assert_eq!(text, std::fs::read_to_string(path).unwrap(), "STYRMIN_UPDATE=1 writes it anew");
    }

    #[test]
    fn a_text_that_is_too_long_keeps_the_risks_and_says_where_the_whole_is() {
        let all = render(&facts(60), usize::MAX).body;
        assert!(!all.contains("Shortened"));
        for most in [12_000, 9_000] {
            let text = render(&facts(60), most).body;
            assert!(text.chars().count() <= most, "{} of {most}", text.chars().count());
            assert!(
                text.contains("front-59](") && text.contains("The whole is at https://styrmin.example/proposals/p")
            );
        }
        let text = render(&facts(60), 1_000).body;
        assert!(text.chars().count() <= 1_000 && text.contains("The whole is at"));
    }
}
