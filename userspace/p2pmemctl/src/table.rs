// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tables in the style of lsblk: aligned columns without lines, which people read and programs cut.
//!
//! A cell is one word, `-` if it has no value. Only a column of messages has spaces; it is the last default column of
//! its table. `-o` selects columns, `-b` prints sizes in bytes, `-n` omits the header.

use anstyle::{AnsiColor, Style};
use clap::Args;

use crate::{Context, UsageError};

/// Style of something that is as it has to be.
pub(crate) const GOOD: Style = AnsiColor::Green.on_default();
/// Style of something to look at.
pub(crate) const WARNING: Style = AnsiColor::Yellow.on_default();
/// Style of a failure.
pub(crate) const BAD: Style = AnsiColor::Red.on_default().bold();
/// Style of a header.
pub(crate) const BOLD: Style = Style::new().bold();
/// Style of something that matters less than the rest.
pub(crate) const FAINT: Style = Style::new().dimmed();

/// Blanks between two columns.
const GAP: &str = "  ";

/// Options of the commands that print a table.
#[derive(Debug, Clone, Default, Args)]
pub struct TableArgs {
    /// Print these columns instead of the default ones. A plus sign before the first one adds to the default columns.
    #[arg(short, long, value_name = "COLUMNS", value_delimiter = ',')]
    output: Vec<String>,

    /// Print sizes in bytes.
    #[arg(short, long)]
    bytes: bool,

    /// Print neither the header nor any text around the table.
    #[arg(short, long)]
    noheadings: bool,

    /// Print the names and meanings of all columns, and exit.
    #[arg(short = 'H', long)]
    list_columns: bool,
}

impl TableArgs {
    /// Returns whether an option selects columns or rows alone: standard output then has only the table.
    pub(crate) fn is_plain(&self) -> bool {
        self.noheadings || !self.output.is_empty()
    }

    /// Returns whether the columns were selected.
    pub(crate) fn selects(&self) -> bool {
        !self.output.is_empty() || self.list_columns
    }

    /// Returns the table of rows of one kind; `None` if the user requested the list of columns, which is printed.
    ///
    /// # Errors
    ///
    /// There is no column of a requested name, or columns are requested of JSON.
    pub(crate) fn of<R: Row>(&self, context: &mut Context<'_>) -> anyhow::Result<Option<Table<R>>> {
        if self.list_columns {
            let rows: Vec<_> = R::COLUMNS.iter().map(Column::about).collect();
            let table = Table {
                columns: AboutColumn::COLUMNS.iter().collect(),
                sizes: Sizes::Human,
                header: !self.noheadings,
            };
            if context.json {
                context.print_json(&serde_json::json!({ "columns": rows }))?;
            } else {
                write!(context.out, "{}", table.render(&rows))?;
            }
            return Ok(None);
        }
        if context.json && !self.output.is_empty() {
            return Err(UsageError("--output is for tables: JSON has all fields".into()).into());
        }
        Ok(Some(Table {
            columns: self.columns()?,
            sizes: self.sizes(),
            header: !self.noheadings,
        }))
    }

    /// Returns the form of sizes.
    pub(crate) fn sizes(&self) -> Sizes {
        if self.bytes {
            Sizes::Bytes
        } else {
            Sizes::Human
        }
    }

    fn columns<R: Row>(&self) -> anyhow::Result<Vec<&'static Column<R>>> {
        let default = R::COLUMNS.iter().filter(|column| column.is_default);
        let mut names: Vec<&str> = self.output.iter().map(String::as_str).collect();
        let mut columns = Vec::new();
        match names.first_mut() {
            None => return Ok(default.collect()),
            Some(first) => {
                if let Some(name) = first.strip_prefix('+') {
                    columns.extend(default);
                    *first = name;
                }
            }
        }
        for name in names {
            let found = R::COLUMNS.iter().find(|column| column.name.eq_ignore_ascii_case(name));
            columns.push(found.ok_or_else(|| {
                let all: Vec<_> = R::COLUMNS.iter().map(|column| column.name).collect();
                UsageError(format!("there is no column {name:?}: use some of {}", all.join(", ")))
            })?);
        }
        Ok(columns)
    }
}

/// The form of sizes in a table.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Sizes {
    /// Numbers with units, such as `64M`.
    Human,
    /// Numbers of bytes.
    Bytes,
}

impl Sizes {
    /// Returns a size in this form.
    pub(crate) fn show(self, bytes: u64) -> String {
        match self {
            Self::Human => p2pmem::short_size(bytes),
            Self::Bytes => bytes.to_string(),
        }
    }

    /// Returns the cell of a size.
    pub(crate) fn cell(self, bytes: u64) -> Cell {
        cell(self.show(bytes))
    }
}

/// A cell.
#[derive(Debug, Clone)]
pub(crate) struct Cell {
    text: String,
    style: Style,
}

impl Cell {
    /// Returns the cell in a style, which only a terminal shows.
    pub(crate) fn style(self, style: Style) -> Self {
        Self { style, ..self }
    }
}

/// Returns a plain cell.
pub(crate) fn cell(value: impl ToString) -> Cell {
    Cell {
        text: value.to_string(),
        style: Style::new(),
    }
}

/// Returns the cell of a value that may be missing.
pub(crate) fn optional(value: Option<impl ToString>) -> Cell {
    cell(value.map_or_else(String::new, |value| value.to_string()))
}

/// Returns the cell of a property that a thing has or not.
pub(crate) fn yes_or_no(value: bool) -> Cell {
    cell(if value { "yes" } else { "no" })
}

/// The content of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    /// Words, aligned left.
    Text,
    /// Numbers, aligned right.
    Number,
    /// Messages, which have spaces.
    Message,
}

/// A column of a table of `R`.
pub(crate) struct Column<R> {
    name: &'static str,
    about: &'static str,
    content: Content,
    is_default: bool,
    width: usize,
    cell: fn(&R, Sizes) -> Cell,
}

/// Returns a column of words.
pub(crate) const fn text<R>(name: &'static str, about: &'static str, cell: fn(&R, Sizes) -> Cell) -> Column<R> {
    Column {
        name,
        about,
        content: Content::Text,
        is_default: true,
        width: 0,
        cell,
    }
}

/// Returns a column of numbers.
pub(crate) const fn number<R>(name: &'static str, about: &'static str, cell: fn(&R, Sizes) -> Cell) -> Column<R> {
    Column {
        content: Content::Number,
        ..text(name, about, cell)
    }
}

/// Returns a column of messages.
pub(crate) const fn message<R>(name: &'static str, about: &'static str, cell: fn(&R, Sizes) -> Cell) -> Column<R> {
    Column {
        content: Content::Message,
        ..text(name, about, cell)
    }
}

/// Prints a column only if it is requested.
pub(crate) const fn on_request<R>(column: Column<R>) -> Column<R> {
    Column {
        is_default: false,
        ..column
    }
}

/// Sets the width of a column in a table whose rows are printed as they come.
pub(crate) const fn wide<R>(width: usize, column: Column<R>) -> Column<R> {
    Column { width, ..column }
}

impl<R> Column<R> {
    fn header(&self) -> Header {
        Header {
            name: self.name.to_owned(),
            content: self.content,
            width: self.width,
        }
    }

    fn about(&self) -> AboutColumn {
        AboutColumn {
            name: self.name,
            default: self.is_default,
            about: self.about,
        }
    }
}

/// A row of a table with fixed columns.
pub(crate) trait Row: Sized + 'static {
    /// All columns, in the order of the default table.
    const COLUMNS: &'static [Column<Self>];
}

/// A table of rows of one kind.
pub(crate) struct Table<R: Row> {
    columns: Vec<&'static Column<R>>,
    sizes: Sizes,
    header: bool,
}

impl<R: Row> Default for Table<R> {
    fn default() -> Self {
        Self {
            columns: R::COLUMNS.iter().filter(|column| column.is_default).collect(),
            sizes: Sizes::Human,
            header: true,
        }
    }
}

impl<R: Row> Table<R> {
    fn headers(&self) -> Vec<Header> {
        self.columns.iter().map(|column| column.header()).collect()
    }

    fn cells(&self, row: &R) -> Vec<Cell> {
        let cells = self.columns.iter().map(|column| (column.cell)(row, self.sizes));
        cells.collect()
    }

    /// Renders the table.
    pub(crate) fn render(&self, rows: &[R]) -> String {
        let rows: Vec<_> = rows.iter().map(|row| self.cells(row)).collect();
        render(&self.headers(), &rows, self.header)
    }

    /// Renders the header of a table whose rows are printed as they come; nothing without a header.
    pub(crate) fn first_line(&self) -> String {
        render(&self.headers(), &[], self.header)
    }

    /// Renders one row of such a table.
    pub(crate) fn line(&self, row: &R) -> String {
        let mut headers = self.headers();
        for header in &mut headers {
            header.width = header.width.max(header.name.len());
        }
        render(&headers, &[self.cells(row)], false)
    }
}

/// A header of a column.
#[derive(Debug, Clone)]
pub(crate) struct Header {
    /// The name.
    pub(crate) name: String,
    /// The content of the column.
    pub(crate) content: Content,
    /// The least width.
    pub(crate) width: usize,
}

/// Renders rows, with a header if `header`. Each line ends with a newline and has no trailing blanks.
pub(crate) fn render(headers: &[Header], rows: &[Vec<Cell>], header: bool) -> String {
    let mut lines: Vec<Vec<Cell>> = Vec::with_capacity(rows.len() + 1);
    if header {
        lines.push(headers.iter().map(|header| cell(&header.name).style(BOLD)).collect());
    }
    lines.extend(rows.iter().map(|row| {
        let words = row.iter().zip(headers).map(|(cell, header)| Cell {
            text: word(&cell.text, header.content),
            style: cell.style,
        });
        words.collect()
    }));
    let width = |n: usize| {
        let cells = lines.iter().filter_map(|line| line.get(n));
        cells.map(|cell| cell.text.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = headers.iter().enumerate().map(|(n, h)| width(n).max(h.width)).collect();
    let mut out = String::new();
    for line in &lines {
        let mut blanks = String::new();
        for ((Cell { text, style }, header), width) in line.iter().zip(headers).zip(&widths) {
            let fill = " ".repeat(width.saturating_sub(text.chars().count()));
            if header.content == Content::Number {
                out.push_str(&format!("{blanks}{fill}{style}{text}{style:#}"));
                blanks = GAP.to_owned();
            } else {
                out.push_str(&format!("{blanks}{style}{text}{style:#}"));
                blanks = fill + GAP;
            }
        }
        out.push('\n');
    }
    out
}

/// Returns the text of a cell: one word, except in a column of messages.
fn word(text: &str, content: Content) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    match (words.is_empty(), content) {
        (true, _) => "-".into(),
        (false, Content::Message) => words.join(" "),
        (false, _) => words.join("_"),
    }
}

/// A column in the list of columns.
#[derive(Debug, serde::Serialize)]
struct AboutColumn {
    name: &'static str,
    default: bool,
    about: &'static str,
}

impl Row for AboutColumn {
    const COLUMNS: &'static [Column<Self>] = &[
        text("COLUMN", "name of the column", |column, _| cell(column.name)),
        text("DEFAULT", "whether the table has it by default", |column, _| {
            yes_or_no(column.default)
        }),
        message("MEANING", "what the column has", |column, _| cell(column.about)),
    ];
}

/// Returns the names of the columns of a table.
pub(crate) fn names<R: Row>() -> Vec<(&'static str, &'static str)> {
    R::COLUMNS.iter().map(|column| (column.name, column.about)).collect()
}

/// Returns the list of the columns of a table, for the end of a command's help.
pub(crate) fn help<R: Row>(title: &str) -> String {
    let width = R::COLUMNS.iter().map(|column| column.name.len()).max().unwrap_or(0);
    let mut help = format!("{title} (* not by default):\n");
    for Column {
        name,
        about,
        is_default,
        ..
    } in R::COLUMNS
    {
        let mark = if *is_default { ' ' } else { '*' };
        help += &format!("{mark} {name:<width$}  {about}\n");
    }
    help.truncate(help.trim_end().len());
    help
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Thing(u64, &'static str);

    impl Row for Thing {
        const COLUMNS: &'static [Column<Self>] = &[
            number("SIZE", "size", |thing, sizes| sizes.cell(thing.0)),
            text("NAME", "name", |thing, _| cell(thing.1)),
            on_request(message("NOTE", "remark", |thing, _| cell(format!("about {}", thing.1)))),
        ];
    }

    fn table(options: &[&str]) -> anyhow::Result<Table<Thing>> {
        let command = TableArgs::augment_args(clap::Command::new("test"));
        let matches = command.try_get_matches_from([&["test"], options].concat())?;
        let args = <TableArgs as clap::FromArgMatches>::from_arg_matches(&matches)?;
        Ok(Table {
            columns: args.columns()?,
            sizes: args.sizes(),
            header: !args.noheadings,
        })
    }

    fn plain(options: &[&str], rows: &[Thing]) -> String {
        let text = table(options).unwrap().render(rows);
        anstream::adapter::strip_str(&text).to_string()
    }

    #[test]
    fn cells_are_aligned_words() {
        let rows = [Thing(10 << 20, "two words"), Thing(1536, "")];
        assert_eq!(plain(&[], &rows), "SIZE  NAME\n 10M  two_words\n1.5K  -\n");
        assert_eq!(
            plain(&["-o", "+note"], &rows[..1]),
            "SIZE  NAME       NOTE\n 10M  two_words  about two words\n"
        );
        assert_eq!(
            plain(&["-n", "-b", "-oname,size"], &rows),
            "two_words  10485760\n-              1536\n"
        );
        assert_eq!(plain(&["-n"], &[]), "");
    }

    #[test]
    fn rows_that_come_one_by_one_have_fixed_widths() {
        let table = table(&["-b"]).unwrap();
        let text = table.first_line() + &table.line(&Thing(7, "a")) + &table.line(&Thing(8, "b"));
        assert_eq!(
            anstream::adapter::strip_str(&text).to_string(),
            "SIZE  NAME\n   7  a\n   8  b\n"
        );
    }

    #[test]
    fn unknown_columns_are_named() {
        let error = table(&["-o", "SIZE,weight"]).err().unwrap();
        assert!(error.is::<UsageError>());
        assert_eq!(
            error.to_string(),
            "there is no column \"weight\": use some of SIZE, NAME, NOTE"
        );
    }

    #[test]
    fn styles_surround_text_alone() {
        let headers = [Header {
            name: "N".into(),
            content: Content::Number,
            width: 3,
        }];
        let out = render(&headers, &[vec![cell(1).style(BAD)]], false);
        assert_eq!(out, format!("  {BAD}1{BAD:#}\n"));
    }
}
