//! Puts changed files into a tree: bare repository, no checkout, no index. Costs what changes,
//! not what is there.

use super::sign::Signer;
use git2::{FileMode, ObjectType, Oid, Repository, Time, Tree};
use std::collections::BTreeMap;
use std::io::Write as _;
use styrmin_renderer::layout;

/// What happens to one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Edit {
    /// The file shall have this content.
    Write(String),
    /// The file shall have this content unless there is one already.
    Keep(String),
    /// The file shall not be there.
    Remove,
}

/// What happens, by path in the repository.
pub type Edits = BTreeMap<String, Edit>;

/// Author or committer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// Name.
    pub name: String,
    /// Email.
    pub email: String,
}

/// What a commit says besides its tree and parent.
#[derive(Debug, Clone, Copy)]
pub struct Stamp<'a> {
    /// The message.
    pub message: &'a str,
    /// Who changed.
    pub author: &'a Signature,
    /// Who committed.
    pub committer: &'a Signature,
    /// When, in seconds since the Unix epoch.
    pub seconds: i64,
    /// Signs it.
    pub signer: Option<&'a Signer>,
}

/// From how many edits on objects go into one pack instead of a file each: ten thousand loose
/// files would cost more than everything else together.
const PACK_FROM: usize = 500;

/// Looking for deltas among ten thousand small files takes ten times as long as writing them.
/// libgit2 looks for none in files above a threshold, which it reads (up to 1.9 at least) from the
/// first of these settings instead of the second.
const NO_DELTA: [&str; 2] = ["pack.deltacachesize", "core.bigfilethreshold"];

/// The tree of `base` (`None`: empty) with `edits`. An edit that changes nothing costs a look-up.
///
/// # Errors
/// When an object cannot be read or written, or a path leads through a file.
pub fn splice(repository: &Repository, base: Option<&Tree<'_>>, edits: &Edits) -> Result<Oid, git2::Error> {
    splice_as(repository, base, edits, edits.len() >= PACK_FROM)
}

fn splice_as(
    repository: &Repository,
    base: Option<&Tree<'_>>,
    edits: &Edits,
    packed: bool,
) -> Result<Oid, git2::Error> {
    let changes: Vec<(&str, &Edit)> = edits.iter().map(|(path, edit)| (path.as_str(), edit)).collect();
    let mut written = Vec::new();
    if !packed {
        let tree = folder(repository, base, &changes, &mut written)?;
        return tree.map_or_else(|| repository.treebuilder(None)?.write(), Ok);
    }
    // A handle of its own: what is written through it stays in memory, later commits must not.
    let scratch = Repository::open(repository.path())?;
    let mut settings = scratch.config()?;
    for name in NO_DELTA {
        if settings.get_i64(name).ok() != Some(1) {
            settings.set_i64(name, 1)?;
        }
    }
    let database = scratch.odb()?;
    database.add_new_mempack_backend(1000)?;
    let base = base.map(|tree| scratch.find_tree(tree.id())).transpose()?;
    let tree = match folder(&scratch, base.as_ref(), &changes, &mut written)? {
        Some(tree) => tree,
        None => {
            let empty = scratch.treebuilder(None)?.write()?;
            written.push(empty);
            empty
        }
    };
    let mut builder = scratch.packbuilder()?;
    for id in written {
        builder.insert_object(id, None)?;
    }
    let mut pack = git2::Buf::new();
    builder.write_buf(&mut pack)?;
    let target = repository.odb()?;
    let mut writer = target.packwriter()?;
    writer.write_all(&pack).map_err(|error| git2::Error::from_str(&format!("pack: {error}")))?;
    writer.commit()?;
    Ok(tree)
}

/// One folder with the edits below it, whose paths are sorted and relative to it; `None` when
/// nothing is left in it. Adds what it writes to `written`.
fn folder(
    repository: &Repository,
    base: Option<&Tree<'_>>,
    edits: &[(&str, &Edit)],
    written: &mut Vec<Oid>,
) -> Result<Option<Oid>, git2::Error> {
    let mut builder = repository.treebuilder(base)?;
    let mut changed = false;
    let mut rest = edits;
    while let Some((path, edit)) = rest.first() {
        let (name, inner) = path.split_once('/').map_or((*path, None), |(name, inner)| (name, Some(inner)));
        let existing = base.and_then(|tree| tree.get_name(name));
        let old = existing.as_ref().map(git2::TreeEntry::id);
        let (new, mode, count) = if inner.is_none() {
            (file(repository, old, edit, written)?, FileMode::Blob, 1)
        } else {
            let below = |path: &str| path.strip_prefix(name).is_some_and(|rest| rest.starts_with('/'));
            let count = rest.iter().take_while(|(path, _)| below(path)).count();
            let children: Vec<(&str, &Edit)> =
                rest[..count].iter().map(|(path, edit)| (&path[name.len() + 1..], *edit)).collect();
            let tree = match &existing {
                // In the place of an environment's, a shard's or a deployment's folder nothing else can be meant.
                Some(entry) if entry.kind() != Some(ObjectType::Tree) && layout::is_folder(name) => None,
                Some(entry) if entry.kind() != Some(ObjectType::Tree) => {
                    let message = format!(
                        "\"{name}\" is a file, but a folder is needed there for {:?}; remove or rename the file",
                        children.first().map(|(path, _)| format!("{name}/{path}")).unwrap_or_default()
                    );
                    return Err(git2::Error::from_str(&message));
                }
                Some(entry) => Some(repository.find_tree(entry.id())?),
                None => None,
            };
            (folder(repository, tree.as_ref(), &children, written)?, FileMode::Tree, count)
        };
        rest = &rest[count..];
        if new == old {
            continue;
        }
        changed = true;
        match new {
            Some(id) => drop(builder.insert(name, id, mode.into())?),
            None => builder.remove(name)?,
        }
    }
    match base {
        Some(tree) if !changed => return Ok(Some(tree.id())),
        _ if builder.is_empty() => return Ok(None),
        _ => {}
    }
    let id = builder.write()?;
    written.push(id);
    Ok(Some(id))
}

/// The blob that an edit leads to, written when it is not there yet.
fn file(
    repository: &Repository,
    old: Option<Oid>,
    edit: &Edit,
    written: &mut Vec<Oid>,
) -> Result<Option<Oid>, git2::Error> {
    let content = match edit {
        Edit::Remove => return Ok(None),
        Edit::Keep(_) if old.is_some() => return Ok(old),
        Edit::Keep(content) | Edit::Write(content) => content.as_bytes(),
    };
    let id = Oid::hash_object(ObjectType::Blob, content)?;
    if old != Some(id) {
        repository.blob(content)?;
        written.push(id);
    }
    Ok(Some(id))
}

/// A commit object on `parent`; no reference is moved.
///
/// # Errors
/// When it cannot be written or signed.
pub fn commit(repository: &Repository, tree: Oid, parent: Option<Oid>, stamp: &Stamp<'_>) -> Result<Oid, git2::Error> {
    let time = Time::new(stamp.seconds, 0);
    let author = git2::Signature::new(&stamp.author.name, &stamp.author.email, &time)?;
    let committer = git2::Signature::new(&stamp.committer.name, &stamp.committer.email, &time)?;
    let parent = parent.map(|id| repository.find_commit(id)).transpose()?;
    let parents: Vec<&git2::Commit<'_>> = parent.iter().collect();
    let tree = repository.find_tree(tree)?;
    let Some(signer) = stamp.signer else {
        return repository.commit(None, &author, &committer, stamp.message, &tree, &parents);
    };
    let buffer = repository.commit_create_buffer(&author, &committer, stamp.message, &tree, &parents)?;
    let signature = signer.sign(&buffer).map_err(|error| git2::Error::from_str(&format!("signature: {error}")))?;
    let text = std::str::from_utf8(&buffer).map_err(|error| git2::Error::from_str(&format!("commit: {error}")))?;
    repository.commit_signed(text, &signature, None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(repository: &Repository, tree: Oid) -> BTreeMap<String, String> {
        let mut files = BTreeMap::new();
        let tree = repository.find_tree(tree).unwrap();
        tree.walk(git2::TreeWalkMode::PreOrder, |folder, entry| {
            if entry.kind() == Some(ObjectType::Blob) {
                let blob = repository.find_blob(entry.id()).unwrap();
                files.insert(
                    format!("{folder}{}", entry.name().unwrap_or_default()),
                    String::from_utf8_lossy(blob.content()).into_owned(),
                );
            }
            git2::TreeWalkResult::Ok
        })
        .unwrap();
        files
    }

    fn path() -> impl Strategy<Value = String> {
        // Folders a and b, files f…: no path leads through a file.
        prop::collection::vec("[ab]", 0..3)
            .prop_flat_map(|folders| "f[0-4]".prop_map(move |file| [folders.clone(), vec![file]].concat().join("/")))
    }

    fn edit() -> impl Strategy<Value = Edit> {
        prop_oneof!["[x-z]{1,2}".prop_map(Edit::Write), "[x-z]{1,2}".prop_map(Edit::Keep), Just(Edit::Remove)]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn splicing_does_to_a_tree_what_the_edits_say(rounds in prop::collection::vec(prop::collection::btree_map(path(), edit(), 0..8), 1..5), packed: bool) {
            let folder = tempfile::tempdir().unwrap();
            let repository = Repository::init_bare(folder.path()).unwrap();
            let mut expected: BTreeMap<String, String> = BTreeMap::new();
            let mut tree: Option<Oid> = None;
            for edits in rounds {
                for (path, edit) in &edits {
                    match edit {
                        Edit::Write(text) => { expected.insert(path.clone(), text.clone()); }
                        Edit::Keep(text) => { expected.entry(path.clone()).or_insert_with(|| text.clone()); }
                        Edit::Remove => { expected.remove(path); }
                    }
                }
                let base = tree.map(|id| repository.find_tree(id).unwrap());
                let next = splice_as(&repository, base.as_ref(), &edits, packed).unwrap();
                let us = Signature { name: "a".into(), email: "a@b".into() };
                let stamp = Stamp { message: "x", author: &us, committer: &us, seconds: 1, signer: None };
                let made = commit(&repository, next, None, &stamp).unwrap();
                prop_assert!(Repository::open_bare(folder.path()).unwrap().find_commit(made).is_ok());
                let fresh = Repository::open_bare(folder.path()).unwrap();
                prop_assert_eq!(read(&fresh, next), expected.clone());
                tree = Some(next);
            }
        }
    }
}
