//! How the command ends when something is wrong: a sentence, a remedy, an exit code.

use std::io::{self, Write};
use std::process::ExitCode;

use serde::{Deserialize, Serialize};
use statecopy_client::Error;

use crate::terminal::{plain, plain_lines};

/// What was verified is not what it must be: copied bytes, or stored kernels.
pub(crate) const EXIT_MISMATCHES: u8 = 1;
/// Wrong usage or input.
pub(crate) const EXIT_USAGE: u8 = 2;
/// Anything that is no refusal.
pub(crate) const EXIT_FAILED: u8 = 3;

/// `doctor` found a problem.
pub(crate) const EXIT_UNFIT: u8 = 4;

/// A failure with everything that a user is told. It also travels from a worker process to the command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{sentence}")]
pub(crate) struct Failure {
    /// The exit code.
    pub(crate) exit: u8,
    /// What is wrong.
    pub(crate) sentence: String,
    /// What to do about it; may be empty.
    pub(crate) remedy: String,
}

impl Failure {
    /// The user asked for what cannot be, or gave broken input.
    pub(crate) fn usage(sentence: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { exit: EXIT_USAGE, sentence: sentence.into(), remedy: remedy.into() }
    }

    /// Something else failed.
    pub(crate) fn other(sentence: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { exit: EXIT_FAILED, sentence: sentence.into(), remedy: remedy.into() }
    }

    /// What a user is told of an error.
    pub(crate) fn of(error: &anyhow::Error) -> Self {
        for cause in error.chain() {
            if let Some(failure) = cause.downcast_ref::<Self>() {
                return failure.clone();
            }
            if let Some(error) = cause.downcast_ref::<Error>() {
                return Self::of_client(error);
            }
        }
        Self::other(format!("{error:#}"), "")
    }

    /// The same, as what happened inside that worker process.
    pub(crate) fn of_worker(self, number: u32) -> Self {
        Self { sentence: format!("worker {number}: {}", self.sentence), ..self }
    }

    fn of_client(error: &Error) -> Self {
        let exit = error.code().map_or(EXIT_FAILED, statecopy_client::RefusalCode::exit_code);
        let sentence = match error {
            // A refusal's sentence carries names that a worker chose.
            Error::Refused(refusal) => format!("{}: {}", refusal.code(), refusal.sentence()),
            other => with_sources(other),
        };
        Self { exit, sentence: plain(&sentence), remedy: plain(error.remedy()) }
    }
}

/// Tells the user, and says how the process ends.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    let failure = Failure::of(error);
    let mut stderr = io::stderr().lock();
    // There is nobody left to tell when standard error is closed.
    let _told = writeln!(stderr, "statecopy: {}", plain(&failure.sentence));
    if !failure.remedy.is_empty() {
        let _told = writeln!(stderr, "  {}", plain_lines(&failure.remedy));
    }
    ExitCode::from(failure.exit)
}

fn with_sources(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let said = cause.to_string();
        // Some causes repeat their own cause.
        if !text.ends_with(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use anyhow::Context;
    use statecopy_client::{Refusal, RefusalCode};

    use super::*;

    #[test]
    fn a_refusal_keeps_its_exit_code_sentence_and_remedy_through_any_context() {
        for code in RefusalCode::ALL {
            let refused = Error::from(Refusal::new(code, "Layer a is wrong").remedied_by("Do it."));
            let error = Err::<(), _>(refused).context("Registering").unwrap_err();
            let failure = Failure::of(&error);
            assert_eq!(failure.exit, code.exit_code());
            assert!(failure.exit > EXIT_UNFIT);
            assert_eq!(failure.sentence, format!("{code}: Layer a is wrong"));
            assert_eq!(failure.remedy, "Do it.");
        }
    }

    #[test]
    fn a_name_in_a_refusal_cannot_steer_the_terminal() {
        let refusal = Refusal::new(RefusalCode::LayoutInvalid, "Layer \x1b[2J\nx has no rows");
        let error = Error::from(refusal.remedied_by("Correct \x1b[2J\nx."));
        let failure = Failure::of(&error.into());
        assert_eq!(failure.sentence, r"LAYOUT_INVALID: Layer \u{1b}[2J\u{a}x has no rows");
        assert_eq!(failure.remedy, r"Correct \u{1b}[2J\u{a}x.");
    }

    #[test]
    fn the_documented_exit_codes_are_those_of_the_refusals() {
        let document = include_str!("../../../docs/exit-codes.md");
        let documented: Vec<&str> = document
            .lines()
            .filter(|line| line.starts_with("| ") && line.contains("| `"))
            .collect();
        let rows = RefusalCode::ALL
            .map(|code| format!("| {} | `{code}` | {} |", code.exit_code(), code.remedy()));
        assert_eq!(documented, rows, "the table must be:\n{}", rows.join("\n"));
        for exit in [0, EXIT_MISMATCHES, EXIT_USAGE, EXIT_FAILED, EXIT_UNFIT] {
            assert!(document.contains(&format!("\n| {exit} | ")), "{exit}");
        }
    }

    #[test]
    fn usage_is_two_and_everything_else_three() {
        let usage = anyhow::Error::from(Failure::usage("No", "Try")).context("Reading");
        assert_eq!(Failure::of(&usage).exit, EXIT_USAGE);
        let other = anyhow::anyhow!("inner").context("outer");
        assert_eq!(Failure::of(&other).exit, EXIT_FAILED);
        assert_eq!(Failure::of(&other).sentence, "outer: inner");
    }
}
