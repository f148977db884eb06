//! What is wrong with somebody's input, said so that they can mend it: object, field, remedy.

use std::fmt;

/// One thing that is wrong. Never carries a secret value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// What the person named or made, for example `deployment "shop"`.
    pub object: String,
    /// Where in it, as people write it: `config.ip_whitelist[0]`. Empty: the object as a whole.
    pub field: String,
    /// What is wrong and what to do about it.
    pub message: String,
}

impl Problem {
    /// A problem of `field` in `object`.
    pub fn new(object: impl Into<String>, field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { object: object.into(), field: field.into(), message: message.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.object)?;
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        f.write_str(&self.message)
    }
}

impl std::error::Error for Problem {}

/// Everything that is wrong, not only the first: people mend their input once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Problems(pub Vec<Problem>);

impl Problems {
    /// `Ok` when nothing was found.
    ///
    /// # Errors
    /// Itself, when it holds at least one problem.
    pub fn into_result(self) -> Result<(), Self> {
        if self.0.is_empty() { Ok(()) } else { Err(self) }
    }

    /// Adds one.
    pub fn push(&mut self, object: impl Into<String>, field: impl Into<String>, message: impl Into<String>) {
        self.0.push(Problem::new(object, field, message));
    }
}

impl From<Problem> for Problems {
    fn from(problem: Problem) -> Self {
        Self(vec![problem])
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("; ")?;
            }
            problem.fmt(f)?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}
