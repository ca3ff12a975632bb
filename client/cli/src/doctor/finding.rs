//! What doctor says: findings, the worst first.

use std::fmt::Write as _;

use serde::Serialize;

use crate::terminal::plain;

/// How bad a finding is. The order is that of the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Severity {
    /// Something will not work.
    Problem,
    /// It works, and worse than it could, or not for long.
    Warning,
    /// Worth knowing.
    Note,
    /// As it should be.
    Ok,
}

impl Severity {
    fn label(self) -> &'static str {
        match self {
            Self::Problem => "PROBLEM",
            Self::Warning => "WARNING",
            Self::Note => "note",
            Self::Ok => "ok",
        }
    }
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    /// How bad it is.
    pub(super) severity: Severity,
    /// What was looked at: a name that does not change.
    pub(super) check: &'static str,
    /// The device that it is about, as `--device` takes it.
    pub(super) device: Option<String>,
    /// What was found: a number, or the system's own words.
    pub(super) evidence: String,
    /// What that means for statecopy.
    pub(super) meaning: String,
    /// What to do about it; empty where nothing is to be done.
    pub(super) remedy: String,
}

impl Finding {
    pub(super) fn new(
        severity: Severity,
        check: &'static str,
        evidence: impl Into<String>,
    ) -> Self {
        Self {
            severity,
            check,
            device: None,
            evidence: evidence.into(),
            meaning: String::new(),
            remedy: String::new(),
        }
    }

    pub(super) fn of_device(self, ordinal: u32) -> Self {
        Self { device: Some(format!("cuda:{ordinal}")), ..self }
    }

    pub(super) fn means(self, meaning: impl Into<String>) -> Self {
        Self { meaning: meaning.into(), ..self }
    }

    pub(super) fn remedied_by(self, remedy: impl Into<String>) -> Self {
        Self { remedy: remedy.into(), ..self }
    }
}

/// What `statecopy doctor --json` prints.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// Of the program.
    pub(super) version: &'static str,
    /// How many findings are problems; the exit code is 0 only without one.
    pub(super) problems: usize,
    pub(super) warnings: usize,
    /// Problems first, then warnings, notes, and what is as it should be.
    pub(super) findings: Vec<Finding>,
}

impl Report {
    /// Of findings in any order.
    pub(super) fn of(mut findings: Vec<Finding>) -> Self {
        findings.sort_by_key(|finding| finding.severity);
        let count = |severity| findings.iter().filter(|found| found.severity == severity).count();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            problems: count(Severity::Problem),
            warnings: count(Severity::Warning),
            findings,
        }
    }

    /// A paragraph a finding, and a line for what is as it should be.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for finding in &self.findings {
            let label = finding.severity.label();
            let device = finding.device.as_ref().map_or(String::new(), |name| format!(" {name}"));
            let evidence = plain(&finding.evidence);
            let _written = writeln!(text, "{label:8}{}{device}: {evidence}", finding.check);
            if finding.severity == Severity::Ok {
                continue;
            }
            let remedy = match finding.remedy.as_str() {
                "" => String::new(),
                remedy => format!("Do: {remedy}"),
            };
            for part in [&finding.meaning, &remedy].into_iter().filter(|part| !part.is_empty()) {
                let _written = writeln!(text, "        {}", plain(part));
            }
            text.push('\n');
        }
        let (problems, warnings) = (self.problems, self.warnings);
        let _written = writeln!(text, "Problems: {problems}, warnings: {warnings}");
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_come_first_and_what_is_well_is_one_line() {
        let report = Report::of(vec![
            Finding::new(Severity::Ok, "page_size", "4096 bytes").means("Nothing."),
            Finding::new(Severity::Warning, "cpus", "1").means("No spinning."),
            Finding::new(Severity::Problem, "memory", "\x1b[2J").of_device(3).remedied_by("Free."),
        ]);
        let expected = "PROBLEM memory cuda:3: \\u{1b}[2J\n        Do: Free.\n\n\
                        WARNING cpus: 1\n        No spinning.\n\n\
                        ok      page_size: 4096 bytes\nProblems: 1, warnings: 1\n";
        assert_eq!(report.text(), expected);
    }
}
