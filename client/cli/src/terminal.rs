//! What a person sees: tables on standard output, progress on a terminal only.

use std::io::{self, IsTerminal, Write};

use anyhow::Context;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

pub(crate) use statecopy_kernels::findings::text::{bytes, grouped};

/// Rows of text in columns. The first row is the heading.
#[derive(Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
    has_heading: bool,
}

impl Table {
    /// A table with a heading.
    pub(crate) fn new<const N: usize>(heading: [&str; N]) -> Self {
        Self { rows: vec![heading.map(str::to_owned).to_vec()], has_heading: true }
    }

    /// A table of names and values, without a heading. Its values are of many kinds: none is aligned to the right.
    pub(crate) fn of_values() -> Self {
        Self { rows: Vec::new(), has_heading: false }
    }

    /// Adds a row. A cell is one line, whatever a worker put into it.
    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.map(|cell| plain(&cell)).to_vec());
    }

    /// Whether there is nothing but a heading.
    pub(crate) fn is_empty(&self) -> bool {
        self.rows.len() < 2
    }

    /// The text, two spaces between columns. A column under a heading whose cells are numbers, with or without a unit,
    /// is aligned to the right.
    pub(crate) fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let cells = |at: usize| self.rows.iter().filter_map(move |row| row.get(at));
        let widths: Vec<usize> = (0..columns)
            .map(|at| cells(at).map(|cell| cell.chars().count()).max().unwrap_or(0))
            .collect();
        let right: Vec<bool> = (0..columns)
            .map(|at| {
                let mut values = cells(at).skip(1).filter(|cell| !cell.is_empty()).peekable();
                self.has_heading
                    && at > 0
                    && values.peek().is_some()
                    && values.all(|cell| is_number(cell))
            })
            .collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (at, cell) in row.iter().enumerate() {
                let padding = " ".repeat(widths[at] - cell.chars().count());
                let (before, after) = if right[at] { (&*padding, "") } else { ("", &*padding) };
                line.push_str(before);
                line.push_str(cell);
                line.push_str(after);
                line.push_str("  ");
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

fn is_number(cell: &str) -> bool {
    // With a unit, and no sentence that begins with a number.
    cell.starts_with(|first: char| first.is_ascii_digit()) && cell.split(' ').count() <= 2
}

/// Text as one line that a terminal only shows. Labels and names of layers are any worker's choice: what would move the
/// cursor, start an escape sequence, break the line or turn its direction is shown as `\u{1b}`.
pub(crate) fn plain(text: &str) -> String {
    escaped(text, |character| character.escape_unicode().to_string())
}

/// The same for text of several lines of this program's own.
pub(crate) fn plain_lines(text: &str) -> String {
    text.split('\n').map(plain).collect::<Vec<_>>().join("\n")
}

fn escaped(text: &str, escape: impl Fn(char) -> String) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        if is_invisible(character) {
            shown.push_str(&escape(character));
        } else {
            shown.push(character);
        }
    }
    shown
}

/// Control characters, and those that only change how others are shown.
fn is_invisible(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// Writes text of one or more lines to standard output. Who reads it may stop early, as `head` does.
///
/// # Errors
/// When it cannot be written.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    write(&plain_lines(text))
}

fn write(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("Standard output"),
    }
}

/// Writes one JSON object to standard output.
///
/// # Errors
/// When it cannot be written.
pub(crate) fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    write(&json_text(value)?)
}

fn json_text(value: &impl Serialize) -> anyhow::Result<String> {
    // JSON itself lets through what it need not escape, such as U+009B, which begins an escape sequence too.
    let text = serde_json::to_string_pretty(value)?;
    let lines = text
        .split('\n')
        .map(|line| escaped(line, |character| format!("\\u{:04x}", u32::from(character))));
    Ok(lines.collect::<Vec<_>>().join("\n") + "\n")
}

/// Tells a person something beside the result.
pub(crate) fn note(text: &str) {
    // A closed standard error is no reason to stop.
    let _told = writeln!(io::stderr().lock(), "{}", plain_lines(text));
}

/// A bar for work of so many parts: on a terminal, and not beside JSON.
pub(crate) fn progress(parts: u64, unit: &str, json: bool) -> ProgressBar {
    if json || !io::stderr().is_terminal() {
        return ProgressBar::with_draw_target(Some(parts), ProgressDrawTarget::hidden());
    }
    let template = format!("{{bar:40}} {{pos}}/{{len}} {unit}  {{elapsed}}  {{msg}}");
    let bar = ProgressBar::new(parts);
    match ProgressStyle::with_template(&template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_numbers_stand_to_the_right() {
        let mut table = Table::new(["NAME", "BYTES", "STATE"]);
        table.row(["a".into(), "1,024".into(), "published".into()]);
        table.row(["long".into(), "9".into(), "x".into()]);
        let expected = "NAME  BYTES  STATE\na     1,024  published\nlong      9  x\n";
        assert_eq!(table.render(), expected);
        assert!(!table.is_empty());
        assert!(Table::new(["A"]).is_empty());
    }

    #[test]
    fn sentences_that_begin_with_a_number_stand_to_the_left() {
        let mut table = Table::new(["CHECK", "EVIDENCE"]);
        table.row(["cpus".to_owned(), "2 may be used (quota)".to_owned()]);
        table.row(["pages".to_owned(), "4096 bytes".to_owned()]);
        let expected = "CHECK  EVIDENCE\ncpus   2 may be used (quota)\npages  4096 bytes\n";
        assert_eq!(table.render(), expected);
    }

    #[test]
    fn values_of_many_kinds_stand_to_the_left() {
        let mut table = Table::of_values();
        table.row(["cache".into(), "tiny, 4 layers".into()]);
        table.row(["rows".into(), "7".into()]);
        table.row(["copied".into(), "1.00 MiB".into()]);
        assert_eq!(table.render(), "cache   tiny, 4 layers\nrows    7\ncopied  1.00 MiB\n");
    }

    #[test]
    fn what_would_steer_a_terminal_is_shown_instead() {
        assert_eq!(
            plain("a\x1b[2J\nb\u{9b}c\u{202e}d\x7f"),
            r"a\u{1b}[2J\u{a}b\u{9b}c\u{202e}d\u{7f}"
        );
        assert_eq!(plain("Schicht 0, 層, é"), "Schicht 0, 層, é");
        assert_eq!(plain_lines("a\nb\r\n"), "a\nb\\u{d}\n");
        let mut table = Table::new(["NAME", "OF"]);
        table.row(["x\ny".into(), "\x1b]0;t\x07".into()]);
        assert_eq!(table.render(), "NAME     OF\nx\\u{a}y  \\u{1b}]0;t\\u{7}\n");
    }

    #[test]
    fn json_steers_no_terminal_and_stays_the_same_value() {
        let value = serde_json::json!({ "label": "a\u{9b}1m\u{202e}\x1b\n\x7f" });
        let text = json_text(&value).unwrap();
        assert!(text.contains(r"a\u009b1m\u202e\u001b\n\u007f"), "{text}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }

    #[test]
    fn numbers_are_grouped_and_sizes_have_units() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1_000), "1,000");
        assert_eq!(grouped(12_345_678), "12,345,678");
        assert_eq!(bytes(1_023), "1023 B");
        assert_eq!(bytes(786_432), "768.00 KiB");
        assert_eq!(bytes(u64::MAX), "16777215.99 TiB");
    }
}
