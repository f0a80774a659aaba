//! Aligned tables that fit the terminal by leaving out the least important columns.

use std::fmt::Write;

use super::{Style, columns_of};

/// Space between columns.
const GAP: usize = 2;

/// What a cell says with its colour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Paint {
    /// Nothing.
    #[default]
    Plain,
    /// Stands back.
    Dim,
    /// Stands out.
    Bold,
    /// As it should be.
    Good,
    /// Worth a look.
    Warn,
    /// Wrong.
    Bad,
}

impl Paint {
    pub(super) fn code(self) -> Option<&'static str> {
        match self {
            Self::Plain => None,
            Self::Dim => Some("2"),
            Self::Bold => Some("1"),
            Self::Good => Some("32"),
            Self::Warn => Some("33"),
            Self::Bad => Some("31"),
        }
    }

    /// Zero stands back; anything else has `self`.
    #[must_use]
    pub fn unless_zero(self, n: u64) -> Self {
        if n == 0 { Self::Dim } else { self }
    }
}

/// Where a column's texts stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Words and bars.
    Left,
    /// Numbers.
    Right,
}

/// A column's heading.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    title: &'static str,
    align: Align,
    /// Columns with the highest number are left out first; 0 stays.
    expendable: u8,
}

impl Column {
    /// A column of words.
    #[must_use]
    pub const fn left(title: &'static str, expendable: u8) -> Self {
        Self { title, align: Align::Left, expendable }
    }

    /// A column of numbers.
    #[must_use]
    pub const fn right(title: &'static str, expendable: u8) -> Self {
        Self { title, align: Align::Right, expendable }
    }
}

/// One cell.
#[derive(Clone, Debug, Default)]
pub struct Cell {
    text: String,
    paint: Paint,
}

impl Cell {
    /// A cell in a colour.
    #[must_use]
    pub fn new(text: impl Into<String>, paint: Paint) -> Self {
        Self { text: text.into(), paint }
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::new(text, Paint::Plain)
    }
}

/// Rows under headings.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Row>,
}

#[derive(Clone, Debug)]
enum Row {
    Cells(Vec<Cell>),
    /// A remark about the row above.
    Note(String),
}

impl Table {
    /// An empty table.
    #[must_use]
    pub fn new(columns: Vec<Column>) -> Self {
        Self { columns, rows: Vec::new() }
    }

    /// Adds a row; what is missing at its end stays empty.
    pub fn row(&mut self, cells: Vec<Cell>) {
        debug_assert!(cells.len() <= self.columns.len(), "more cells than columns");
        self.rows.push(Row::Cells(cells));
    }

    /// Adds a remark below the last row.
    pub fn note(&mut self, text: String) {
        self.rows.push(Row::Note(text));
    }

    /// The table as lines, each ended by a newline and begun by `indent`.
    #[must_use]
    pub fn render(&self, style: Style, indent: &str) -> String {
        let widths = self.widths(style.width.saturating_sub(indent.len()));
        let mut out = String::new();
        let titles: Vec<Cell> =
            self.columns.iter().map(|c| Cell::new(c.title, Paint::Dim)).collect();
        self.line(&mut out, style, indent, &widths, &titles);
        for row in &self.rows {
            match row {
                Row::Cells(cells) => self.line(&mut out, style, indent, &widths, cells),
                Row::Note(text) => {
                    out.push_str(indent);
                    out.push_str(&style.paint(Paint::Dim, &fitted(text, style.width)));
                    out.push('\n');
                }
            }
        }
        out
    }

    /// The width of each column; `None` where there is no room for it.
    fn widths(&self, room: usize) -> Vec<Option<usize>> {
        let mut widths: Vec<Option<usize>> = self
            .columns
            .iter()
            .enumerate()
            .map(|(i, column)| {
                let cells = self.rows.iter().filter_map(|row| match row {
                    Row::Cells(cells) => cells.get(i),
                    Row::Note(_) => None,
                });
                let widest = cells.map(|cell| columns_of(&cell.text)).max().unwrap_or(0);
                Some(widest.max(columns_of(column.title)))
            })
            .collect();
        loop {
            let total: usize = widths.iter().flatten().map(|w| w + GAP).sum();
            let first_to_go = (0..widths.len())
                .filter(|&i| widths[i].is_some() && self.columns[i].expendable > 0)
                .max_by_key(|&i| self.columns[i].expendable);
            match first_to_go {
                Some(i) if total > room.saturating_add(GAP) => widths[i] = None,
                _ => return widths,
            }
        }
    }

    fn line(
        &self,
        out: &mut String,
        style: Style,
        indent: &str,
        widths: &[Option<usize>],
        cells: &[Cell],
    ) {
        let start = out.len();
        out.push_str(indent);
        let mut first = true;
        for ((column, width), cell) in self.columns.iter().zip(widths).zip(cells) {
            let Some(width) = width else { continue };
            if !first {
                out.push_str("  ");
            }
            first = false;
            let pad = " ".repeat(width - columns_of(&cell.text).min(*width));
            let text = style.paint(cell.paint, &cell.text);
            let done = match column.align {
                Align::Left => write!(out, "{text}{pad}"),
                Align::Right => write!(out, "{pad}{text}"),
            };
            done.unwrap_or_else(|_| unreachable!("a String takes everything"));
        }
        out.truncate(start + out[start..].trim_end().len());
        out.push('\n');
    }
}

fn fitted(text: &str, width: usize) -> String {
    if columns_of(text) <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new(vec![
            Column::left("NAME", 0),
            Column::right("N", 0),
            Column::left("BAR", 2),
            Column::right("OTHER", 1),
        ]);
        table.row(vec!["a".into(), "1,000".into(), "██".into(), "x".into()]);
        table.row(vec!["longer".into(), "2".into()]);
        table.note("a remark".to_owned());
        table
    }

    #[test]
    fn columns_are_aligned() {
        assert_eq!(
            table().render(Style::PLAIN, " "),
            " NAME        N  BAR  OTHER\n a       1,000  ██       x\n longer      2\na remark\n"
                .replace("\na remark", "\n a remark")
        );
    }

    #[test]
    fn narrow_terminals_lose_the_least_important_columns() {
        let narrow = |width| table().render(Style { color: false, width }, "");
        assert!(narrow(25).starts_with("NAME        N  BAR  OTHER\n"));
        assert!(narrow(24).starts_with("NAME        N  OTHER\n"));
        assert!(narrow(10).starts_with("NAME        N\n"));
        assert!(narrow(5).ends_with("a re…\n"));
    }

    #[test]
    fn colours_do_not_shift_columns() {
        let mut table = Table::new(vec![Column::right("N", 0), Column::left("B", 0)]);
        table.row(vec![Cell::new("7", Paint::Bad), "x".into()]);
        table.row(vec!["100".into(), "y".into()]);
        let out = table.render(Style { color: true, width: 80 }, "");
        assert!(out.contains("  \x1b[31m7\x1b[0m  x\n"), "{out:?}");
    }
}
